"""Validates answers under their schemas, by jsonschema_rs.

Reads lines of JSON with `schema` and `answer` (text) from standard input. Prints each answer that is
not valid and exits with 1; or prints the number of valid answers.
"""

import json
import sys

import jsonschema_rs


def number(text):
    """Returns a float. JSON has no largest number, and a grammar allows any exponent."""
    return max(-1e308, min(float(text), 1e308))


def reason(schema, answer):
    """Returns why `answer` is not valid under `schema`; None if it is."""
    try:
        value = json.loads(answer, parse_float=number)
    except ValueError as error:
        return f"not JSON: {error}"
    draft7 = "draft-07" in (schema.get("$schema", "") if isinstance(schema, dict) else "")
    kind = jsonschema_rs.Draft7Validator if draft7 else jsonschema_rs.Draft202012Validator
    try:
        kind(schema, validate_formats=True).validate(value)
    except jsonschema_rs.ValidationError as error:
        return str(error).splitlines()[0]
    return None


valid, invalid = 0, 0
# Bytes, since `splitlines` of a text also splits at characters that answers contain.
for line in sys.stdin.buffer.read().splitlines():
    case = json.loads(line)
    why = reason(case["schema"], case["answer"])
    if why is None:
        valid += 1
    else:
        invalid += 1
        print(why, json.dumps(case["schema"]), case["answer"], sep="\n  ")
if invalid:
    sys.exit(1)
print(valid, "valid")
