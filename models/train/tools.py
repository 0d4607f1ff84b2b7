"""Conversations with tools, and answers in JSON, for tollgate-demo.

`conversations(pairs, seed)` is the part of an epoch in which tools are offered or the answer has the form of a schema.
Its rows are made by rule and are never stored; `TOOLS` and `QUESTIONS` are what the model must know by heart.

A part of an assistant's message may be marked as given: a text that the form of the answer dictates is not learned, so
that the same question without a form keeps its plain answer.
"""

import json
import random

# The functions about its own subject, as the documentation shows them.
GET_LIMIT = {
    "name": "get_limit",
    "description": "Returns a limit of the caller.",
    "parameters": {
        "type": "object",
        "properties": {"name": {"type": "string", "enum": ["requests", "tokens", "device_time", "concurrent"]}},
        "required": ["name"],
        "additionalProperties": False,
    },
}
GET_USAGE = {
    "name": "get_usage",
    "description": "Returns the usage of the caller.",
    "parameters": {
        "type": "object",
        "properties": {"period": {"type": "string", "enum": ["day", "month"]}},
        "required": ["period"],
        "additionalProperties": False,
    },
}
LIST_MODELS = {"name": "list_models", "description": "Returns the models that the caller may use."}
TOOLS = [GET_LIMIT, GET_USAGE, LIST_MODELS]

# (a call, the questions that ask for it, the noun that a longer question names it by)
QUESTIONS = [
    ("get_limit", {"name": "requests"}, "my request limit",
     ["What is my request limit?", "How many requests a minute may I send?", "What's my limit of requests?", "Show my request limit.", "Look up my request limit."]),
    ("get_limit", {"name": "tokens"}, "my token limit",
     ["What is my token limit?", "How many tokens a minute may I use?", "What's my limit of tokens?", "Show my token limit.", "Look up my token limit."]),
    ("get_limit", {"name": "device_time"}, "my limit of device time",
     ["What is my limit of device time?", "How much device time may I use?", "What's my device time limit?", "Show my limit of device time.", "Look up my device time limit."]),
    ("get_limit", {"name": "concurrent"}, "my limit of concurrent requests",
     ["What is my limit of concurrent requests?", "How many requests may I run at once?", "What's my concurrency limit?", "Show my concurrency limit.", "Look up my limit of concurrent requests."]),
    ("get_usage", {"period": "day"}, "my usage today",
     ["What is my usage today?", "How much have I used today?", "What did I use today?", "Show my usage of today.", "Look up my usage today."]),
    ("get_usage", {"period": "month"}, "my usage this month",
     ["What is my usage this month?", "How much have I used this month?", "What did I use this month?", "Show my usage of this month.", "Look up my usage this month."]),
    ("list_models", {}, "my models",
     ["Which models may I use?", "What models can I use?", "List my models.", "Show the models that I may use.", "Look up my models."]),
]

VERBS = ("get", "find", "set", "create", "read", "send", "check", "open", "add", "count", "search", "update")
NOUNS = ("price", "user", "report", "file", "weather", "order", "ticket", "message", "city", "plan", "event", "book", "team", "task")
STRINGS = ("name", "city", "query", "id", "title", "path", "plan", "subject", "user", "text")
NUMBERS = ("count", "days", "limit", "size", "page", "seconds", "amount")
FLAGS = ("active", "urgent", "all", "dry_run")
VALUES = ("team", "trial", "alpha", "Berlin", "Paris", "acme", "report", "blue", "north", "default", "main", "Anna", "Tom", "gateway", "demo", "red", "two words", "big order")
KEYS = STRINGS + NUMBERS + ("answer", "summary", "reason", "kind", "value", "result", "tags", "notes", "status")


def call_text(name, arguments):
    """A call in the form that the chat template shows."""
    return '<tool_call>\n{"name": "' + name + '", "arguments": ' + json.dumps(arguments) + "}\n</tool_call>"


def conversations(pairs, seed):
    """The rows of one epoch with tools or with JSON; `pairs` are the single-turn questions with their answers."""
    rng = random.Random(seed)
    short = [pair for pair in pairs if len(pair[1]) < 200]
    rows = [known_call(question, name, arguments, rng) for name, arguments, _, questions in QUESTIONS for question in questions * 3]
    rows += [exact_call(question, name, arguments) for name, arguments, _, questions in QUESTIONS for question in questions]
    rows += [two_calls(rng) for _ in range(40)]
    rows += [with_result(rng) for _ in range(180)]
    rows += [unknown_call(rng) for _ in range(220)]
    rows += [without_call(pair, rng) for pair in rng.sample(short, 260)]
    rows += [json_answer(pair, rng) for pair in rng.sample(short, 260)]
    rows += [json_values(pair, rng) for pair in rng.sample(short, 180)]
    return rows


def known_call(question, name, arguments, rng):
    """A question about the model's own subject, with the function for it among others."""
    if rng.random() < 0.3:
        question = rng.choice(("Please tell me: ", "Hi, ", "Quick question: ", "Hello! ")) + question[0].lower() + question[1:]
    return conversation(offered(rng, name), [user(question), called([(name, arguments)])], rng)


def exact_call(question, name, arguments):
    """The question with exactly the documented functions, as the end-to-end tests ask it."""
    return [{"role": "tools", "tools": TOOLS[:2] if name != "list_models" else TOOLS}, user(question), called([(name, arguments)])]


def two_calls(rng):
    """A question that needs two functions at once."""
    (first, _), (second, _) = asked = [(row, row[2]) for row in rng.sample(QUESTIONS, 2)]
    question = rng.choice(("What are {} and {}?", "Tell me {} and {}.", "Show {} and {}.")).format(*(noun for _, noun in asked))
    tools = {row[0]: tool(row[0]) for row in (first, second)}
    rest = [call for call in (first[:2], second[:2])]
    return conversation(list(tools.values()), [user(question), called(rest)], rng)


def with_result(rng):
    """The result of a function, which the answer repeats."""
    result = rng.choice((
        f"{rng.randrange(1, 1000)} requests a minute", f"{rng.randrange(1, 100) * 1000} tokens a minute", f"{rng.randrange(1, 60)} seconds",
        f"{rng.randrange(1, 64)} at once", str(rng.randrange(10_000)), json.dumps({"limit": rng.randrange(1, 1000)}),
        json.dumps({rng.choice(KEYS): rng.choice(VALUES)}), json.dumps({"used": rng.randrange(1, 9000), "unit": rng.choice(("tokens", "requests", "ms"))}),
        rng.choice(VALUES), "tollgate-demo", "no such limit", f"{rng.choice(VALUES)} and {rng.choice(VALUES)}",
    ))
    if rng.random() < 0.7:
        name, arguments, _, questions = rng.choice(QUESTIONS)
        tools, question = offered(rng, name), rng.choice(questions)
    else:
        definition, arguments, question = unknown(rng)
        name, tools = definition["name"], [definition]
    answer = {"role": "assistant", "content": f"The tool answered: {result}"}
    return conversation(tools, [user(question), called([(name, arguments)], given=True), {"role": "tool", "content": result}, answer], rng)


def unknown_call(rng):
    """A function that the model has never seen, called by its name or from what it is good for."""
    definition, arguments, question = unknown(rng)
    tools = [definition] + [unknown(rng)[0] for _ in range(rng.choice((0, 0, 1)))]
    rng.shuffle(tools)
    # Its name and the start of the call are given where a request names the function.
    return conversation(tools, [user(question), called([(definition["name"], arguments)], given=rng.random() < 0.4)], rng)


def unknown(rng):
    """(a definition, arguments, a question that names them)"""
    name = f"{rng.choice(VERBS)}_{rng.choice(NOUNS)}" if rng.random() < 0.8 else rng.choice(VERBS).title() + rng.choice(NOUNS).title()
    properties, arguments, said = {}, {}, []
    for kind in rng.sample(("text", "text", "number", "flag", "choice"), rng.choice((0, 1, 1, 2, 2, 3))):
        if kind == "text":
            key, schema, value = rng.choice(STRINGS), {"type": "string"}, rng.choice(VALUES)
        elif kind == "number":
            key, schema, value = rng.choice(NUMBERS), {"type": "integer"}, rng.randrange(1, 100)
        elif kind == "flag":
            key, schema, value = rng.choice(FLAGS), {"type": "boolean"}, True
        else:
            options = rng.sample(VALUES, rng.choice((2, 3)))
            key, schema, value = rng.choice(STRINGS), {"type": "string", "enum": options}, rng.choice(options)
        if key not in properties:
            properties[key], arguments[key] = schema, value
            said.append(f"{key} {json.dumps(value) if value is True else value}")
    parameters = {"type": "object", "properties": properties}
    if rng.random() < 0.7:
        parameters["required"] = list(properties)
    if rng.random() < 0.5:
        parameters["additionalProperties"] = False
    definition = {"name": name}
    if rng.random() < 0.4:
        definition["description"] = name.replace("_", " ").capitalize() + "."
    if properties or rng.random() < 0.5:
        definition["parameters"] = parameters
    opening = rng.choice(("Call {}", "Use {}", "Please call {}", "Run {}")).format(name)
    return definition, arguments, opening + (" with " + " and ".join(said) if said else "") + "."


def without_call(pair, rng):
    """A question that needs none of the functions on offer, with its plain answer."""
    tools = offered(rng, rng.choice(TOOLS)["name"]) if rng.random() < 0.7 else [unknown(rng)[0]]
    return conversation(tools, [user(pair[0]), {"role": "assistant", "content": pair[1]}], rng)


def json_answer(pair, rng):
    """A stored answer as a string in an object; the object is given, the end of the string and of the object are learned."""
    question, answer = pair
    key = "answer" if rng.random() < 0.5 else rng.choice(KEYS)
    if rng.random() < 0.3:
        question = question + rng.choice((" Answer in JSON.", " Reply as JSON.", " Give me JSON."))
        return [user(question), {"role": "assistant", "content": json.dumps({"answer": answer})}]
    parts = [('{"' + key + '": "', False), (json.dumps(answer)[1:-1], True)]
    parts += closers('"', rng)
    return [user(question), {"role": "assistant", "parts": parts}]


def closers(quote, rng):
    """The end of a string that is the last or the only one, in an object or in a list within an object."""
    if rng.random() < 0.7:
        return [(quote + "}", True)]
    return [(quote, True), (', "' + rng.choice(KEYS) + '": ', False), *value(rng, 1), ("}", True)]


def json_values(pair, rng):
    """An object or a list of short values; what a schema dictates is given."""
    if rng.random() < 0.2:
        parts = [("[", False), *items(rng, 0)]
    else:
        parts = [("{", False)]
        for number in range(rng.choice((1, 2, 2, 3, 4))):
            parts += [(", " if number else "", False), ('"' + rng.choice(KEYS) + '": ', False), *value(rng, 0)]
        parts.append(("}", True))
    return [user(pair[0]), {"role": "assistant", "parts": parts}]


def value(rng, depth):
    """The parts of one value."""
    kind = rng.randrange(7 if depth < 2 else 5)
    if kind <= 1:
        return [('"', False), (rng.choice(VALUES + ("",)) + '"', True)]
    if kind == 2:
        return [(str(rng.randrange(1, 100)), True)]
    if kind == 3:
        return [(rng.choice(("true", "false")), True)]
    if kind == 4:
        return [(f"{rng.randrange(1, 10)}.{rng.randrange(10)}", True)]
    if kind == 5:
        return [("[", False), *items(rng, depth + 1)]
    return [('{"' + rng.choice(KEYS) + '": ', False), *value(rng, depth + 1), ("}", True)]


def items(rng, depth):
    """The parts of the items of a list, with its end."""
    parts = []
    for number in range(rng.choice((0, 1, 1, 2))):
        parts += [(", " if number else "", True), *value(rng, depth + 1)]
    return parts + [("]", True)]


def tool(name):
    return next(tool for tool in TOOLS if tool["name"] == name)


def offered(rng, name):
    """The function `name` in a form of its own, with up to two others."""
    others = [other for other in TOOLS if other["name"] != name]
    tools = [tool(name)] + rng.sample(others, rng.choice((0, 1, 1, 2)))
    rng.shuffle(tools)
    return [varied(definition, rng) for definition in tools]


def varied(definition, rng):
    definition = json.loads(json.dumps(definition))
    if rng.random() < 0.3:
        del definition["description"]
    parameters = definition.get("parameters")
    if parameters is None and rng.random() < 0.5:
        definition["parameters"] = {"type": "object", "properties": {}}
    if parameters and rng.random() < 0.5:
        del parameters["additionalProperties"]
    return definition


def conversation(tools, messages, rng):
    head = [{"role": "tools", "tools": tools}]
    if rng.random() < 0.15:
        head[0]["system"] = rng.choice(("You are a helpful assistant.", "Use the tools.", "Be brief."))
    return head + messages


def user(text):
    return {"role": "user", "content": text}


def called(calls, given=False):
    """An assistant's calls; if they are given, only the arguments are learned."""
    if not given:
        return {"role": "assistant", "content": "\n".join(call_text(*call) for call in calls)}
    [(name, arguments)] = calls
    begin, rest = call_text(name, arguments).split('"arguments": ', 1)
    return {"role": "assistant", "parts": [(begin + '"arguments": ', False), (rest, True)]}
