"""Tools with the unmodified `openai` Python SDK, on a model whose calls are required.

The model does not know these tools. The gateway lets it write nothing but a call, so the
calls and their arguments must be whole whatever the model prefers.
"""

import json
import os
import ssl
import typing
import unittest

import openai
import pydantic

TLS = ssl.create_default_context(cafile=os.environ["TOLLGATE_CA"])
MODEL = "tollgate-demo"
QUESTION = [{"role": "user", "content": "What is the limit of plan team?"}]


class GetLimit(pydantic.BaseModel):
    """Returns a limit of a plan."""

    plan: typing.Literal["team", "trial"]
    window_seconds: int = pydantic.Field(ge=1, le=99)


GET_USAGE = {
    "type": "function",
    "function": {
        "name": "get_usage",
        "description": "Returns the usage of a tenant.",
        "parameters": {
            "type": "object",
            "properties": {"days": {"type": "integer", "minimum": 0, "maximum": 30}},
            "required": ["days"],
            "additionalProperties": False,
        },
    },
}
TOOLS = [openai.pydantic_function_tool(GetLimit), GET_USAGE]


def client():
    http = openai.DefaultHttpxClient(verify=TLS)
    url = os.environ["TOLLGATE_URL"] + "/v1"
    return openai.OpenAI(base_url=url, api_key=os.environ["TOLLGATE_KEY"], http_client=http)


def ask(**fields):
    fields = {"model": MODEL, "messages": QUESTION, "tools": TOOLS, "max_tokens": 300, **fields}
    return client().chat.completions.create(**fields)


class Tools(unittest.TestCase):
    def check(self, call):
        arguments = json.loads(call.function.arguments)
        if call.function.name == "GetLimit":
            GetLimit.model_validate(arguments)
        else:
            self.assertEqual(call.function.name, "get_usage")
            self.assertTrue(0 <= arguments["days"] <= 30)

    def test_required(self):
        for seed in range(4):
            choice = ask(
                tool_choice="required", parallel_tool_calls=False, seed=seed, temperature=1.2
            ).choices[0]
            self.assertEqual(choice.finish_reason, "tool_calls")
            self.assertIsNone(choice.message.content)
            self.assertEqual(len(choice.message.tool_calls), 1)
            self.check(choice.message.tool_calls[0])

    def test_named_and_answered(self):
        choice = ask(
            tool_choice={"type": "function", "function": {"name": "get_usage"}}, temperature=0
        ).choices[0]
        [call] = choice.message.tool_calls
        self.assertEqual(call.function.name, "get_usage")
        self.check(call)
        messages = [
            *QUESTION,
            choice.message,
            {"role": "tool", "tool_call_id": call.id, "content": '{"used": 3}'},
        ]
        answer = ask(messages=messages, tool_choice="none").choices[0]
        self.assertIsNone(answer.message.tool_calls)
        self.assertIsInstance(answer.message.content, str)

    def test_stream_equals_whole(self):
        fields = {"tool_choice": "required", "parallel_tool_calls": False, "temperature": 0}
        whole = ask(**fields).choices[0].message.tool_calls[0].function
        name, arguments, kinds = "", "", set()
        for chunk in ask(**fields, stream=True):
            for call in chunk.choices[0].delta.tool_calls or []:
                self.assertEqual(call.index, 0)
                name += call.function.name or ""
                arguments += call.function.arguments or ""
                kinds.add(call.type)
        self.assertEqual((name, arguments), (whole.name, whole.arguments))
        self.assertIn("function", kinds)

    def test_stream_helper_parses(self):
        fields = {"model": MODEL, "messages": QUESTION, "max_tokens": 300, "temperature": 0}
        tools = [openai.pydantic_function_tool(GetLimit)]
        with client().chat.completions.stream(
            **fields, tools=tools, tool_choice="required", parallel_tool_calls=False
        ) as stream:
            events = [event.type for event in stream]
            [call] = stream.get_final_completion().choices[0].message.tool_calls
        self.assertIn("tool_calls.function.arguments.done", events)
        self.assertIsInstance(call.function.parsed_arguments, GetLimit)

    def test_mistakes_name_their_place(self):
        open_call = {"role": "tool", "tool_call_id": "call_1", "content": "x"}
        strict = {"type": "function", "function": {"name": "f", "strict": True,
                  "parameters": {"type": "object", "not": {}}}}
        for fields, param in [
            ({"tools": [GET_USAGE, GET_USAGE]}, "tools[1].function.name"),
            ({"tools": [strict]}, "tools[0].function.parameters.not"),
            ({"tool_choice": {"type": "function", "function": {"name": "g"}}},
             "tool_choice.function.name"),
            ({"messages": [*QUESTION, open_call]}, "messages[1].tool_call_id"),
            ({"extra_body": {"structured_outputs": {"regex": "a+"}}}, "structured_outputs"),
        ]:
            with self.assertRaises(openai.BadRequestError) as caught:
                ask(**fields)
            self.assertEqual(caught.exception.param, param, caught.exception)


if __name__ == "__main__":
    unittest.main(verbosity=2)
