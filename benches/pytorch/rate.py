"""How fast a model of `model.py` trains and writes; prints a JSON line with the names that `dreamc bench --json` has.

f32 weights, gradients and optimizer; fused AdamW; clipping. `--compile` compiles the whole loss. Compilation and the first steps are
not timed; the time of a step is the median. Balancing after each step is left out (it is cheap). Writing is greedy, one token at a
time, over preallocated caches.
"""

import argparse
import json
import resource
import statistics
import time

import torch

import model as models
from model import Model, load_spec


def main():
    a = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, kind in (("dreamc", str), ("spec", str), ("batch", int), ("sequence", int), ("steps", int)):
        a.add_argument(f"--{name}", type=kind, required=True)
    a.add_argument("--set", action="append", default=[], help="as `dreamc show --set`")
    a.add_argument("--warmup", type=int, default=3)
    a.add_argument("--device", default="cpu")
    a.add_argument("--threads", type=int)
    a.add_argument("--precision", choices=("f32", "bf16"), default="f32")
    a.add_argument("--compile", action="store_true")
    a.add_argument("--grouped-mm", action="store_true", help="experts' products by one operation")
    a = a.parse_args()
    if a.threads:
        torch.set_num_threads(a.threads)
    torch.manual_seed(0)
    torch.set_float32_matmul_precision("high")
    models.GROUPED_MM = a.grouped_mm
    spec = load_spec(a.dreamc, a.spec, a.set)
    vocab = spec["model"]["vocab"]
    cuda = a.device.startswith("cuda")
    with torch.device(a.device):
        model = Model(spec)
    loss_of = torch.compile(model.loss, dynamic=False) if a.compile else model.loss
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, betas=(0.9, 0.999), weight_decay=1e-3, fused=True)
    dtype = torch.bfloat16 if a.precision == "bf16" else torch.float32

    def step():
        ids = torch.randint(vocab, (a.batch, a.sequence + 1), device=a.device)
        loss = loss_of(ids[:, :-1], ids[:, 1:], dtype)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss

    def timed():
        begun = time.perf_counter()
        loss = step()
        if cuda:
            torch.cuda.synchronize()
        return time.perf_counter() - begun, float(loss.detach())

    _, first = timed()
    for _ in range(a.warmup - 1):
        timed()
    seconds = sorted(timed()[0] for _ in range(a.steps))
    median, tokens = statistics.median(seconds), a.batch * a.sequence
    if cuda:
        peak = torch.cuda.max_memory_allocated()
    else:
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    training = {
        "tokens_per_second": tokens / median,
        "best_tokens_per_second": tokens / seconds[0],
        "step_seconds": median,
        "steps": a.steps,
        "loss": first,
    }
    written = None
    if not cuda:
        # As `dreamc bench`: 64 tokens after a prompt.
        count = min(128, spec["model"]["context"])
        times = [time.perf_counter() for _ in model.write(count, dtype)]
        written = {"tokens_per_second": 63 / (times[-1] - times[-64])}
    report = {"torch": torch.__version__, "training": training, "decoding": written, "peak_resident": peak}
    # What `benches/gpu` reads.
    report |= {"tokens": a.steps * tokens, "train_seconds": sum(seconds), "peak_memory": peak, "loss": first}
    print(json.dumps(report))


if __name__ == "__main__":
    main()
