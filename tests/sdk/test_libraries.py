"""Client libraries, unmodified: chats, streams, answers under a schema, and calls of tools.

The model is small, so a test asks for what it knows, or for an answer whose form is enforced. What
the libraries only ask for in words is not tested.
"""

import asyncio
import os
import typing
import unittest

import pydantic

URL = os.environ["TOLLGATE_URL"] + "/v1"
KEY = os.environ["TOLLGATE_KEY"]
CA = os.environ["TOLLGATE_CA"]
# As a user of a private CA sets them, before the libraries are imported.
os.environ.update(SSL_CERT_FILE=CA, OPENAI_API_KEY=KEY, OPENAI_BASE_URL=URL)
# LiteLLM fetches its prices from the network otherwise.
os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"

import agents
import instructor
import litellm
import openai
from langchain_core.messages import HumanMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from llama_index.core.llms import ChatMessage
from llama_index.core.prompts import PromptTemplate
from llama_index.core.tools import FunctionTool
from llama_index.llms.openai_like import OpenAILike
from pydantic_ai import Agent, NativeOutput
from pydantic_ai.models.openai import OpenAIChatModel
from pydantic_ai.providers.openai import OpenAIProvider

MODEL = "tollgate-demo"
LIMIT = "What is my request limit?"
CAPITAL = "What is the capital of France?"


class Answer(pydantic.BaseModel):
    """An answer in one word or a few."""

    answer: str


def get_limit(name: typing.Literal["requests", "tokens", "device_time", "concurrent"]) -> str:
    """Returns a limit of the caller."""
    return "60 requests a minute"


class LangChain(unittest.TestCase):
    model = ChatOpenAI(model=MODEL, temperature=0, max_tokens=100)

    def test_chat_and_stream(self):
        whole = self.model.invoke("What is a rate limit?").content
        pieces = [chunk.content for chunk in self.model.stream("What is a rate limit?")]
        self.assertEqual("".join(pieces), whole)
        self.assertGreater(len(pieces), 2)

    def test_structured_output_by_each_method(self):
        for method, more in [
            ("function_calling", {"strict": True}),
            ("json_schema", {"strict": True}),
            # The schema is only asked for in words; any object is an answer.
            ("json_mode", {"include_raw": True}),
        ]:
            with self.subTest(method):
                model = self.model.with_structured_output(Answer, method=method, **more)
                found = model.invoke(CAPITAL + " Answer in JSON.")
                if method == "json_mode":
                    self.assertTrue(found["raw"].content.startswith("{"))
                else:
                    self.assertIsInstance(found, Answer)

    def test_tool_loop(self):
        model = self.model.bind_tools([tool(get_limit)])
        messages = [HumanMessage(LIMIT)]
        asked = model.invoke(messages)
        self.assertEqual([call["name"] for call in asked.tool_calls], ["get_limit"])
        call = asked.tool_calls[0]
        messages += [asked, ToolMessage(get_limit(**call["args"]), tool_call_id=call["id"])]
        self.assertIn("requests a minute", model.invoke(messages).content)


class LlamaIndex(unittest.TestCase):
    model = OpenAILike(
        model=MODEL,
        api_base=URL,
        api_key=KEY,
        is_chat_model=True,
        is_function_calling_model=True,
        max_tokens=100,
    )

    def test_chat_and_stream(self):
        self.assertIn("4", str(self.model.complete("What is 2 plus 2?")))
        stream = self.model.stream_chat([ChatMessage(role="user", content="Say hello.")])
        self.assertTrue("".join(chunk.delta for chunk in stream))

    def test_structured_prediction(self):
        found = self.model.structured_predict(Answer, PromptTemplate(CAPITAL))
        self.assertIsInstance(found, Answer)

    def test_tools(self):
        tools = [FunctionTool.from_defaults(get_limit)]
        reply = self.model.chat_with_tools(tools, user_msg=LIMIT)
        calls = self.model.get_tool_calls_from_response(reply)
        self.assertEqual([call.tool_name for call in calls], ["get_limit"])


class LiteLLM(unittest.TestCase):
    tools = [
        {
            "type": "function",
            "function": {
                "name": "get_limit",
                "description": "Returns a limit of the caller.",
                "parameters": {
                    "type": "object",
                    "properties": {"name": {"type": "string", "enum": ["requests", "tokens"]}},
                    "required": ["name"],
                    "additionalProperties": False,
                },
            },
        }
    ]

    def ask(self, **fields):
        litellm.ssl_verify = CA
        provider = fields.pop("provider", "openai")
        messages = [{"role": "user", "content": fields.pop("content", LIMIT)}]
        model = f"{provider}/{MODEL}"
        return litellm.completion(
            model, messages=messages, api_base=URL, api_key=KEY, max_tokens=100, **fields
        )

    def test_chat_and_stream(self):
        self.assertTrue(self.ask(content="Say hello.").choices[0].message.content)
        self.assertGreater(len(list(self.ask(stream=True, content="Say hello."))), 1)

    def test_schema_and_tools(self):
        text = self.ask(response_format=Answer, content=CAPITAL).choices[0].message.content
        Answer.model_validate_json(text)
        for provider in ["openai", "hosted_vllm"]:
            reply = self.ask(provider=provider, tools=self.tools, tool_choice="required")
            call = reply.choices[0].message.tool_calls[0]
            self.assertEqual(call.function.name, "get_limit")


class PydanticAi(unittest.TestCase):
    model = OpenAIChatModel(MODEL, provider=OpenAIProvider(base_url=URL, api_key=KEY))

    def test_output_types(self):
        for output in [Answer, NativeOutput(Answer)]:
            with self.subTest(str(output)):
                found = Agent(self.model, output_type=output).run_sync(CAPITAL).output
                self.assertIsInstance(found, Answer)

    def test_tools(self):
        agent = Agent(self.model)
        agent.tool_plain(get_limit)
        self.assertIn("requests a minute", agent.run_sync(LIMIT).output)


class Instructor(unittest.TestCase):
    def test_modes(self):
        for mode in [instructor.Mode.TOOLS_STRICT, instructor.Mode.JSON_SCHEMA]:
            with self.subTest(mode.name):
                client = instructor.from_openai(openai.OpenAI(), mode=mode)
                found = client.chat.completions.create(
                    model=MODEL,
                    response_model=Answer,
                    messages=[{"role": "user", "content": CAPITAL}],
                    max_retries=1,
                    max_tokens=100,
                )
                self.assertIsInstance(found, Answer)


class Agents(unittest.TestCase):
    def run_agent(self, question, **fields):
        async def run():
            agents.set_tracing_disabled(True)
            client = openai.AsyncOpenAI()
            model = agents.OpenAIChatCompletionsModel(model=MODEL, openai_client=client)
            agent = agents.Agent(name="a", model=model, **fields)
            return (await agents.Runner.run(agent, question, max_turns=3)).final_output

        return asyncio.run(run())

    def test_tools_and_output_type(self):
        self.assertIn("requests a minute", self.run_agent(LIMIT, tools=[agents.function_tool(get_limit)]))
        self.assertIsInstance(self.run_agent(CAPITAL, output_type=Answer), Answer)


if __name__ == "__main__":
    unittest.main(verbosity=2)
