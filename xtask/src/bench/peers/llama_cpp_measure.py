"""llama.cpp as one side of a benchmark: the same orders on standard input and
the same answers as the engine's `measure` example, a line each.

    llama_cpp_measure.py FILE.gguf THREADS

`greedy N ID,ID,...`, `decode BATCH CONTEXT STEPS`, `prefill TOKENS`. Only the
decode call is timed; tokens are fed by id and nothing is sampled but greedily.
"""

import ctypes
import json
import sys
import time

import llama_cpp as ll
import numpy as np

MOST_TOKENS = 16384  # over all sequences
STEP_TOKENS = 512
SEQUENCES = 16


class Peer:
    def __init__(self, path: str, threads: int):
        # What it says of itself would stand among the answers.
        self.quiet = ll.llama_log_callback(lambda level, text, data: None)
        ll.llama_log_set(self.quiet, ctypes.c_void_p(0))
        ll.llama_backend_init()
        self.model = ll.llama_model_load_from_file(path.encode(), ll.llama_model_default_params())
        if not self.model:
            sys.exit(f"{path}: llama.cpp does not load it")
        params = ll.llama_context_default_params()
        params.n_ctx = MOST_TOKENS
        params.n_batch = params.n_ubatch = STEP_TOKENS
        params.n_seq_max = SEQUENCES
        params.n_threads = params.n_threads_batch = threads
        self.context = ll.llama_init_from_model(self.model, params)
        if not self.context:
            sys.exit(f"{path}: llama.cpp makes no context")
        self.memory = ll.llama_get_memory(self.context)
        self.vocabulary = ll.llama_vocab_n_tokens(ll.llama_model_get_vocab(self.model))
        self.batch = ll.llama_batch_init(STEP_TOKENS, 0, 1)

    def feed(self, tokens) -> float:
        """One decode call of (token, position, sequence, wants logits); its seconds."""
        batch = self.batch
        batch.n_tokens = len(tokens)
        for index, (token, position, sequence, logits) in enumerate(tokens):
            batch.token[index] = token
            batch.pos[index] = position
            batch.n_seq_id[index] = 1
            batch.seq_id[index][0] = sequence
            batch.logits[index] = logits
        began = time.perf_counter()
        result = ll.llama_decode(self.context, batch)
        # Logits are there when they have been asked for.
        ll.llama_synchronize(self.context)
        seconds = time.perf_counter() - began
        if result != 0:
            sys.exit(f"llama_decode: {result}")
        return seconds

    def logits(self, index: int) -> np.ndarray:
        row = ll.llama_get_logits_ith(self.context, index)
        return np.ctypeslib.as_array(row, shape=(self.vocabulary,))

    def forget(self) -> None:
        ll.llama_memory_clear(self.memory, True)

    def greedy(self, count: int, prompt: list[int]) -> dict:
        self.forget()
        last = len(prompt) - 1
        self.feed([(token, at, 0, at == last) for at, token in enumerate(prompt)])
        ids, at = [int(self.logits(last).argmax())], len(prompt)
        while len(ids) < count:
            self.feed([(ids[-1], at, 0, True)])
            ids.append(int(self.logits(0).argmax()))
            at += 1
        return {"tokens": ids}

    def decode(self, batch: int, context: int, steps: int) -> dict:
        self.forget()
        prompt = [index * 7 % 500 for index in range(context)]
        for sequence in range(batch):
            self.feed([(token, at, sequence, False) for at, token in enumerate(prompt)])
        seconds = 0.0
        for at in range(context, context + steps):
            seconds += self.feed([(7, at, sequence, True) for sequence in range(batch)])
        return {"tokens": batch * steps, "seconds": seconds}

    def prefill(self, tokens: int) -> dict:
        self.forget()
        seconds = 0.0
        for begin in range(0, tokens, STEP_TOKENS):
            end = min(tokens, begin + STEP_TOKENS)
            seconds += self.feed(
                [(at * 7 % 500, at, 0, at == end - 1) for at in range(begin, end)]
            )
        return {"tokens": tokens, "seconds": seconds}

    def obey(self, words: list[str]) -> dict:
        match words:
            case ["greedy", count, prompt]:
                return self.greedy(int(count), [int(token) for token in prompt.split(",")])
            case ["decode", batch, context, steps]:
                return self.decode(int(batch), int(context), int(steps))
            case ["prefill", tokens]:
                return self.prefill(int(tokens))
        sys.exit(f"cannot {' '.join(words)}")


def main(path: str, threads: int) -> None:
    peer = Peer(path, threads)
    about = {
        "engine": "llama.cpp",
        "version": f"llama-cpp-python {ll.__version__}",
        "threads": threads,
        "system": ll.llama_print_system_info().decode().strip(),
        "kv_cache": "f16",
    }
    print("ready", json.dumps(about), flush=True)
    for line in sys.stdin:
        print(json.dumps(peer.obey(line.split())), flush=True)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
