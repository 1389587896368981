"""How fast vLLM writes with a model that dreamc exported; prints a JSON line with the names that `dreamc bench --json` has.

A model with random weights is trained for one step, exported for transformers, and read by vLLM: its tokens mean nothing, its work is the
same. Greedy, after a prompt of 64 tokens, as many written for every text. What the engine's start, one round of warming up and the prompt with
the first token take is not counted.
"""

import argparse
import json
import pathlib
import subprocess
import time

PROMPT = 64


def exported(dreamc, spec, work, device):
    """A folder for transformers; made once."""
    name = pathlib.Path(spec).stem
    run, folder = work / f"decode-run-{name}", work / f"decode-{name}"
    if not (folder / "config.json").exists():
        small = ["train.steps=1", "train.warmup=0", "train.batch=1", "train.accumulate=1", "train.sequence=64"]
        sets = [word for setting in small for word in ("--set", setting)]
        text = work / "decode.txt"
        text.write_text("One step is enough to write a checkpoint.\n" * 2000)
        # Standard output is for JSON.
        quiet = {"check": True, "stdout": subprocess.DEVNULL}
        train = [dreamc, "train", spec, "--data", str(text), "--device", device, "--out", str(run), "--force", *sets]
        subprocess.run(train, **quiet)
        subprocess.run([dreamc, "export", "hf", str(run), "--dtype", "bf16", "--out", str(folder)], **quiet)
    return folder


def rate(first, whole, texts, tokens):
    """Tokens written in a second, by all texts, from the seconds of one token and of all."""
    return texts * (tokens - 1) / (whole - first)


def main():
    a = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name in ("dreamc", "spec"):
        a.add_argument(f"--{name}", required=True)
    a.add_argument("--work", type=pathlib.Path, required=True)
    a.add_argument("--device", default="cuda")
    a.add_argument("--tokens", type=int, default=128)
    a = a.parse_args()
    folder = exported(a.dreamc, a.spec, a.work, a.device)

    from vllm import LLM, SamplingParams

    model = LLM(model=str(folder), dtype="bfloat16", skip_tokenizer_init=True, max_model_len=PROMPT + a.tokens)

    def seconds(prompts, tokens):
        sampling = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True, detokenize=False)
        begun = time.perf_counter()
        model.generate(prompts, sampling, use_tqdm=False)
        return time.perf_counter() - begun

    found = []
    for texts in (1, 8):
        prompts = [{"prompt_token_ids": [1 + (7 * text + place) % 200 for place in range(PROMPT)]} for text in range(texts)]
        seconds(prompts, a.tokens)
        first, whole = seconds(prompts, 1), seconds(prompts, a.tokens)
        found.append({"sequences": texts, "tokens_per_second": rate(first, whole, texts, a.tokens)})
    print(json.dumps(dict(zip(("decoding", "decoding_eight"), found))))


if __name__ == "__main__":
    main()
