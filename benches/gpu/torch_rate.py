"""Training rate of a model of `model.py` on one GPU; prints a JSON line with what dreamc's ledger has.

bf16 compute with f32 weights, fused AdamW, clipping, `torch.compile` of the whole loss, balancing after each step left out (it is
cheap). Compilation and the first steps are not timed; what is timed ends with a synchronisation.
"""

import argparse
import json
import time

import torch

from model import Model, load_spec


def main():
    a = argparse.ArgumentParser()
    for name, kind in (("dreamc", str), ("spec", str), ("batch", int), ("sequence", int), ("steps", int)):
        a.add_argument(f"--{name}", type=kind, required=True)
    a.add_argument("--warmup", type=int, default=5)
    a.add_argument("--device", default="cuda")
    a.add_argument("--eager", action="store_true", help="without torch.compile")
    a = a.parse_args()
    torch.manual_seed(0)
    torch.set_float32_matmul_precision("high")
    spec = load_spec(a.dreamc, a.spec)
    vocab = spec["model"]["vocab"]
    cuda = a.device == "cuda"
    with torch.device(a.device):
        model = Model(spec)
    loss_of = model.loss if a.eager else torch.compile(model.loss, dynamic=False)
    optimizer = torch.optim.AdamW(model.parameters(), lr=4e-4, betas=(0.9, 0.999), weight_decay=1e-3, fused=cuda)
    dtype = torch.bfloat16 if cuda else torch.float32

    def step():
        ids = torch.randint(vocab, (a.batch, a.sequence + 1), device=a.device)
        loss = loss_of(ids[:, :-1], ids[:, 1:], dtype)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss

    for _ in range(a.warmup):
        step()
    if cuda:
        torch.cuda.synchronize()
    begun = time.time()
    for _ in range(a.steps):
        loss = step()
    value = float(loss.detach())
    seconds = time.time() - begun
    peak = torch.cuda.max_memory_allocated() if cuda else 0
    tokens = a.steps * a.batch * a.sequence
    print(json.dumps({"tokens": tokens, "train_seconds": seconds, "peak_memory": peak, "loss": value}))


if __name__ == "__main__":
    main()
