"""The vocabulary of tollgate-demo: a byte-level BPE of 2,048 tokens, trained on the corpus, and its chat template."""

import json

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

import corpus

SIZE = 2048
END_OF_TEXT, START, END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
SPECIAL = [END_OF_TEXT, START, END]

CHAT_TEMPLATE = (
    "{% if tools %}"
    "{{ '<|im_start|>system\\n' }}"
    "{% if messages[0]['role'] == 'system' %}{{ messages[0]['content'] + '\\n' }}{% endif %}"
    "{{ 'Tools:\\n' }}"
    "{% for tool in tools %}{{ tool['function'] | tojson }}{{ '\\n' }}{% endfor %}"
    "{{ '<|im_end|>\\n' }}"
    "{% endif %}"
    "{% for message in messages %}"
    "{% if not (tools and loop.first and message['role'] == 'system') %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' }}"
    "{% if message['content'] %}{{ message['content'] }}{% endif %}"
    "{% if message['tool_calls'] %}"
    "{% for call in message['tool_calls'] %}"
    "{% if message['content'] or not loop.first %}{{ '\\n' }}{% endif %}"
    "{{ '<tool_call>\\n{\"name\": \"' + call['function']['name'] + '\", \"arguments\": ' }}"
    "{{ call['function']['arguments'] | tojson }}{{ '}\\n</tool_call>' }}"
    "{% endfor %}"
    "{% endif %}"
    "{{ '<|im_end|>' + '\\n' }}"
    "{% endif %}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)


def build():
    """The tokenizer, trained on the corpus; always the same."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=SIZE,
        special_tokens=SPECIAL,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    texts = ["system\nuser\nassistant\n"] * 100 + corpus.SYSTEM_PROMPTS
    for question, answer in corpus.singles():
        texts += [question, answer]
    tokenizer.train_from_iterator(texts, trainer)
    assert tokenizer.get_vocab_size() == SIZE
    return tokenizer


def save(tokenizer, folder):
    """Writes the tokenizer's three files."""
    tokenizer.save(str(folder / "tokenizer.json"))
    write_json(folder / "tokenizer_config.json", {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "add_bos_token": False,
        "bos_token": None,
        "eos_token": END,
        "pad_token": END_OF_TEXT,
        "unk_token": None,
        "clean_up_tokenization_spaces": False,
        "model_max_length": 1024,
        "chat_template": CHAT_TEMPLATE,
    })
    write_json(folder / "generation_config.json", {
        "do_sample": False,
        "eos_token_id": [tokenizer.token_to_id(END), tokenizer.token_to_id(END_OF_TEXT)],
        "pad_token_id": tokenizer.token_to_id(END_OF_TEXT),
    })


def encode(tokenizer, messages):
    """Token ids of a conversation, and for each whether the model is to learn it: the assistant's words and their end."""
    if messages[0]["role"] == "prompt":
        prompt, rest = (tokenizer.encode(message["content"]).ids for message in messages)
        rest.append(tokenizer.token_to_id(END_OF_TEXT))
        return prompt + rest, [False] * len(prompt) + [True] * len(rest)
    ids, learn = [], []
    end = tokenizer.token_to_id(END)
    for message in messages:
        role = "system" if message["role"] == "tools" else message["role"]
        theirs = role == "assistant"
        head = tokenizer.encode(f"{START}{role}\n").ids
        tail = tokenizer.encode("\n").ids
        ids += head
        learn += [False] * len(head)
        # The parts of an assistant's message that the form of the answer dictates are not learned.
        for text, learned in message.get("parts") or [(text_of(message), theirs)]:
            part = tokenizer.encode(text).ids
            ids += part
            learn += [learned] * len(part)
        ids += [end] + tail
        learn += [theirs] + [False] * len(tail)
    return ids, learn


def text_of(message):
    """The text of a message, as the chat template writes it."""
    if message["role"] != "tools":
        return message["content"]
    system = message["system"] + "\n" if "system" in message else ""
    return system + "Tools:\n" + "".join(json.dumps(tool) + "\n" for tool in message["tools"])


def write_json(path, value):
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="ascii")
