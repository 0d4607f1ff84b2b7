"""Checks the finished folder with transformers alone: greedy answers to every question, and to some never seen.

    python verify.py [--sample N]

Exit status 1 when fewer than 99.5 % of the questions are answered exactly as questions.jsonl says, or when a question
for one of the documented functions is not answered by its call.
"""

import argparse
import json
import time
from pathlib import Path

import torch
from transformers import AutoTokenizer, GenerationConfig, LlamaForCausalLM

import tools

FOLDER = Path(__file__).resolve().parent.parent / "tollgate-demo"

GROUP = 192

UNSEEN = [
    [("user", "Would you mind telling me what a rate limit is?")],
    [("user", "so what is this tollgate thing all about")],
    [("user", "Put simply, what is a GPU-second?")],
    [("user", "prefill vs decode, what's the difference?")],
    [("user", "Where would one go to create an API key?")],
    [("user", "The server says 429, why is that?")],
    [("user", "Does it run on machines that have no GPU?")],
    [("user", "I cancelled my request, who pays for it?")],
    [("user", "Do you know the capital of Spain?")],
    [("user", "Could you count from 1 to 20 for me, please?")],
    [("user", "5 plus 4 please")],
    [("user", "Hello! Can you tell me what a hold is?")],
    [("user", "What is the nicest beach in Greece?")],
    [("user", "Who wrote the Odyssey?")],
    [("user", "How does a KV cache help?")],
    [("user", "Will anybody read my prompts?")],
    [("user", "Does batching make things cheaper?")],
    [("user", "When exactly does my daily quota start again?")],
    [("system", "You are a pirate. Answer like one."), ("user", "What is a token bucket?")],
    [("system", "You are an assistant for engineers at a large company. Always be polite, and never guess."), ("user", "What is 6 plus 3?")],
    [("user", "Hello!"), ("assistant", "Hello! I am the tollgate demo model. Ask me about rate limits, GPUs or small sums."), ("user", "What is a ledger?")],
    [("user", "Say hi."), ("assistant", "Hi."), ("user", "Thanks."), ("assistant", "Sure."), ("user", "What is 2 plus 2?")],
]


def main():
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--sample", type=int, help="ask only every so many-th question")
    options = options.parse_args()

    tokenizer = AutoTokenizer.from_pretrained(FOLDER, padding_side="left")
    model = LlamaForCausalLM.from_pretrained(FOLDER, dtype=torch.float32).eval()
    model.generation_config = GenerationConfig.from_pretrained(FOLDER)

    for conversation in UNSEEN:
        messages = [{"role": role, "content": text} for role, text in conversation]
        print(" | ".join(text for role, text in conversation if role != "assistant"), "->", answers(model, tokenizer, [messages], 300)[0])

    pairs = [json.loads(line) for line in open(FOLDER / "questions.jsonl", encoding="ascii")][:: options.sample or 1]
    pairs.sort(key=lambda pair: len(pair["answer"]))
    began, right, seen = time.monotonic(), 0, 0
    for start in range(0, len(pairs), GROUP):
        group = pairs[start : start + GROUP]
        room = max(len(tokenizer(pair["answer"]).input_ids) for pair in group) + 16
        replies = answers(model, tokenizer, [[{"role": "user", "content": pair["question"]}] for pair in group], room)
        for pair, reply in zip(group, replies):
            seen += 1
            right += reply == pair["answer"]
            if reply != pair["answer"]:
                print(f"WRONG {pair['question']!r}: {reply!r}")
    print(f"{right} of {seen} questions answered exactly, {right / seen:.4%}, in {time.monotonic() - began:.0f} s")
    all_called = calls_are_right(model, tokenizer)
    raise SystemExit(right / seen < 0.995 or not all_called)


def calls_are_right(model, tokenizer):
    """Whether each question for a documented function gets its call and nothing else."""
    right, seen = 0, 0
    for name, arguments, _, questions in tools.QUESTIONS:
        offered = tools.exact_call(questions[0], name, arguments)[0]["tools"]
        definitions = [{"type": "function", "function": definition} for definition in offered]
        conversations = [[{"role": "user", "content": question}] for question in questions]
        wanted = tools.call_text(name, arguments)
        for question, reply in zip(questions, answers(model, tokenizer, conversations, 80, definitions)):
            seen += 1
            right += reply == wanted
            if reply != wanted:
                print(f"WRONG {question!r}: {reply!r}")
    print(f"{right} of {seen} questions for functions answered by the right call")
    return right == seen


@torch.no_grad()
def answers(model, tokenizer, conversations, room, definitions=None):
    """Greedy replies; rows are padded on the left and each ends at its end token."""
    batch = tokenizer.apply_chat_template(
        conversations, tools=definitions, add_generation_prompt=True, padding=True, return_tensors="pt", return_dict=True
    )
    batch.pop("token_type_ids", None)
    out = model.generate(**batch, max_new_tokens=room, do_sample=False)
    replies = out[:, batch["input_ids"].shape[1] :]
    ends = set(model.generation_config.eos_token_id)
    texts = []
    for row in replies.tolist():
        end = next((place for place, token in enumerate(row) if token in ends), None)
        texts.append(tokenizer.decode(row[:end], clean_up_tokenization_spaces=False) + ("" if end is not None else " [no end]"))
    return texts


if __name__ == "__main__":
    main()
