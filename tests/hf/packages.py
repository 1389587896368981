"""Loads packages that `dreamc export hf` wrote, for `tests/numerics/export.rs`, and compares them with dreamc.

    python tests/hf/packages.py all DIR        every package computes what dreamc computes, and a fault in the code of a package is
                                               noticed, each of FAULTS
    python tests/hf/packages.py each DIR       every folder, a package or a model of a class of theirs, computes what dreamc computes

DIR/NAME.expected.safetensors holds `ids` [b, n] and dreamc's `logits` [b, n, V] for them; `prompt.I` and `written.I`, what dreamc
wrote greedily; for models that run at another depth, `recur` and `deep`, the logits at that depth; for a loop with a gate, `exit` and
`left`, those where tokens leave by it. DIR/NAME/ is the package.
"""

import pathlib
import shutil
import sys

import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, GenerationConfig, PreTrainedTokenizerFast

TOLERANCE = 1e-5


def difference(model, ids, expected):
    with torch.no_grad():
        found = model(ids, use_cache=False).logits
    return ((found - expected).abs().max() / expected.abs().max()).item()


def written(model, prompts, steps, use_cache):
    """Greedy continuations of prompts of different lengths, padded on the left."""
    longest = max(len(p) for p in prompts)
    ids = torch.stack([torch.cat([p.new_zeros(longest - len(p)), p]) for p in prompts])
    mask = torch.stack([torch.cat([p.new_zeros(longest - len(p)), torch.ones_like(p)]) for p in prompts])
    # Nothing ends a text here, so that all are equally long.
    model.generation_config = GenerationConfig()
    config = GenerationConfig(max_new_tokens=steps, do_sample=False, pad_token_id=0, use_cache=use_cache)
    out = model.generate(input_ids=ids, attention_mask=mask, generation_config=config)
    return out[:, longest:]


def texts(folder):
    """The tokenizer of a model of bytes is a token a byte, whatever the text; the byte NUL ends it."""
    tokenizer = PreTrainedTokenizerFast.from_pretrained(folder)
    text = "Ā naïve  \n\tline €, 日本 Ġ\x7f."
    ids = tokenizer(text)["input_ids"]
    good = ids == list(text.encode()) and tokenizer.decode(ids) == text and tokenizer.eos_token_id == 0
    return [] if good else [f"tokenizer: {ids}, {tokenizer.decode(ids)!r}, end {tokenizer.eos_token_id}"]


def check(place, name, quick=False):
    """Compares a package; a `quick` comparison stops at logits that differ."""
    expected = load_file(place / f"{name}.expected.safetensors")
    load = lambda **more: AutoModelForCausalLM.from_pretrained(place / name, trust_remote_code=True, dtype=torch.float32, **more).eval()
    model = load()
    ids = expected["ids"]
    problems = []
    worst = difference(model, ids, expected["logits"])
    if not worst < TOLERANCE:
        problems.append(f"logits differ by {worst:.1e}")
        if quick:
            return False
    if "deep" in expected:
        e = difference(load(recur=expected["recur"].item()), ids, expected["deep"])
        worst = max(worst, e)
        if not e < TOLERANCE:
            problems.append(f"logits at another depth differ by {e:.1e}")
    if "exit" in expected:
        left = load(exit=round(expected["exit"].item(), 6))
        e = difference(left, ids, expected["left"])
        worst = max(worst, e)
        if not e < TOLERANCE or difference(model, ids, expected["left"]) < TOLERANCE:
            problems.append(f"logits of tokens that leave differ by {e:.1e}, or nothing left")
        prompts = [ids[0, :6], ids[1, :9]]
        cached, whole = (written(left, prompts, 8, use_cache) for use_cache in (True, False))
        if not torch.equal(cached, whole):
            problems.append(f"tokens that leave, with cache: {cached.tolist()}, without: {whole.tolist()}")
    count = sum(key.startswith("prompt.") for key in expected)
    if count:
        prompts = [expected[f"prompt.{i}"] for i in range(count)]
        right = [expected[f"written.{i}"] for i in range(count)]
        for use_cache in (True, False):
            together = written(model, prompts, len(right[0]), use_cache)
            for i, prompt in enumerate(prompts):
                alone = written(model, [prompt], len(right[0]), use_cache)[0]
                for way, found in (("together", together[i]), ("alone", alone)):
                    if not torch.equal(found, right[i]):
                        how = "with" if use_cache else "without"
                        problems.append(f"prompt {i}, {way}, {how} cache: {found.tolist()}, not {right[i].tolist()}")
    if (place / name / "tokenizer.json").is_file():
        problems += texts(place / name)
    print(f"{name}: {worst:.1e}, {count} prompts" + "".join(f"\n    {p}" for p in problems), flush=True)
    return not problems


# Lines of the code, and what a hasty writer would have put there.
FAULTS = [
    ("position[1::2] = at.depths - 1 - at.depth", "pass"),
    ("(-2.0 * torch.arange(size // 2,", "(-1.0 * torch.arange(size // 2,"),
    ("[a * cos - b * sin, b * cos + a * sin]", "[a * cos + b * sin, b * cos - a * sin]"),
    ("torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + EPS)", "torch.rsqrt(y.pow(2).sum(-1, keepdim=True) + EPS)"),
    ("(1.0 + self.weight.float())", "self.weight.float()"),
    ("(at.back < self.c[\"window\"])", "(at.back <= self.c[\"window\"])"),
    ("scores = cap * torch.tanh(scores / cap)", "pass"),
    ("best = best + self.bias.float()", "pass"),
    ("gates = gates / gates.sum(-1, keepdim=True)", "pass"),
    ("weight = weight + self.shared.weight", "pass"),
    ("view(*x.shape[:2], -1) * gates", "view(*x.shape[:2], -1)"),
    ("return self.residual_norm(x)", "return x"),
    ("k.repeat_interleave(groups, 1)", "k.repeat(1, groups, 1, 1)"),
    ("q, k = self.q_norm(q), self.k_norm(k)", "pass"),
    ("y = self.post_norm(y)", "pass"),
    ("approximate=\"tanh\"", "approximate=\"none\""),
    ("part = at.part & (r >= 0)", "part = at.part"),
    ("return among & (r > 0)", "return among"),
    ("at.keys, at.seen = part,", "at.keys, _ = part,"),
    ("y * gate[..., None]", "y"),
    ("x = self.norm(x)\n        if logits_to_keep", "if logits_to_keep"),
    ("logits = 30.0 * torch.tanh(logits / 30.0)", "pass"),
    ("self.cache.update(k, v, slot)", "self.cache.update(k, v, 0)"),
    ("(tokens.cumsum(-1) - 1).clamp(min=0)[:, s - t :]", "(tokens.cumsum(-1) - 1).clamp(min=0)[:, :t]"),
    ("F.linear(x, self.weight, self.bias)", "F.linear(x, self.weight)"),
    ("y if self.bias is None else y + self.bias", "y"),
    ("mixed = mixed * share", "pass"),
    ("torch.cat([scores, sink], -1).softmax(-1)[..., :-1]", "scores.softmax(-1)"),
    ("size = int(rope[\"share\"] * size + 1e-9)", "pass"),
    ("turns = turns / s[\"factor\"]\n", "pass\n"),
    ("cos, sin = rope[\"scaling\"][\"attention\"] * cos, rope[\"scaling\"][\"attention\"] * sin", "pass"),
    ("part = part.clamp(0.0, 1.0)", "part = part.clamp(0.0, 0.5)"),
    ("F.softplus(logits).sqrt()", "F.softplus(logits)"),
    ("best = (groups - 1e30 * (two < worst)[..., None]).flatten(-2)", "pass"),
    ("return F.relu(up).square()", "return F.relu(up)"),
    ("self.norm = Norm(h) if c[\"pre_norm\"] else nn.Identity()", "self.norm = Norm(h)"),
    ("q, k = q + self.q.bias, k + self.k.bias", "pass"),
    ("logits = logits + self.logit_bias.float()", "pass"),
    ("None if bias is None else bias[e]", "None"),
    ("torch.sigmoid(1.702 * gate)", "torch.sigmoid(gate)"),
    ("y = y + always", "pass"),
    ("always = always * (x @ self.shared_gate.weight).sigmoid()[..., None]", "pass"),
    ("return torch.zeros_like(x)", "return x"),
    ("fits = ~drawn & (np.abs(number) <= 3.0)", "fits = ~drawn & (np.abs(number) <= 2.0)"),
    ("at.saved[self.name] = x", "at.saved.setdefault(self.name, x)"),
    ("return x + e", "return x"),
    ("torch.cat([x, e], -1)", "torch.cat([e, x], -1)"),
    ("self.mix[\"lambda\"] * x + self.mix[\"mu\"] * e", "self.mix[\"mu\"] * x + self.mix[\"lambda\"] * e"),
    ("torch.exp(-step * self.mix[\"decay\"].exp()) * x", "torch.exp(-step) * x"),
    ("x = self.norm0(x)", "pass"),
    ("return F.linear(x, self.linear.weight)", "return x"),
    ("x = self.body[~i](x, at)", "pass"),
    ("earlier = at.earlier.setdefault(self.name, [])", "earlier = []"),
    ("at.made[source] if source else", "at.update(*at.made[source]) if source else"),
    ("at.made[self.name] = k, v", "at.made.setdefault(self.name, (k, v))"),
    ("at.first_values.setdefault(self.name, v)", "v"),
    ("earlier.append((k[:, :, s - t :], v[:, :, s - t :]))", "pass"),
    ("earlier.append((k[:, :, s - t :], v[:, :, s - t :]))", "earlier.append((k[:, :, :t], v[:, :, :t]))"),
    ("at.history.append(x)\n        x = self.norm(x)", "x = self.norm(x)"),
    ("matrix.lora_a[at.turn]), matrix.lora_b[at.turn]", "matrix.lora_a[0]), matrix.lora_b[0]"),
    ("at.turn + 1 if at.loop is self else 0", "0"),
    ("x = x + self.embed.weight[at.turn]", "pass"),
    ("self.alpha_scale * torch.tanh(x @ self.mix_weight).transpose(-1, -2)", "self.beta_scale * torch.tanh(x @ self.mix_weight)"),
    ("self.beta_scale * torch.tanh(x @ self.beta_weight)", "self.alpha_scale * torch.tanh(x @ self.beta_weight)"),
    ("2.0 * beta.sigmoid()", "beta.sigmoid()"),
    ("mix.transpose(-1, -2)", "mix"),
    ("for _ in range(19)", "for _ in range(1)"),
    ("self.scale.float() * flattened(x, self.weight) + self.bias.float()", "self.bias.float()"),
    ("x = x.sum(-2)", "x = x.mean(-2)"),
    ("return mix @ x +", "return x +"),
    ("if self.results %", "if not self.results %"),
    ("p = (self.norm(v) @ self.weight)", "p = (v @ self.weight)"),
    ("torch.where(self.gone[..., None], before, x)", "x"),
    ("k, v = torch.where(gone, before, k), torch.where(gone, values, v)", "pass"),
    ("torch.cat([k, shared[", "torch.cat([k, 0 * shared["),
    ("repeat_interleave(heads // l[\"keys\"], 2)", "repeat(1, 1, heads // l[\"keys\"], 1)"),
    ("turns[own] for own in pairs", "turns[: len(own)] for own in pairs"),
    ("repeat_interleave(c[\"heads\"] // len(pairs), 0)", "repeat(c[\"heads\"] // len(pairs), 1)"),
    ("return self.first_pass[self.place - 1]", "return (*self.update(k, v), self.first_pass[self.place - 1][2])"),
    ("alpha[turn], beta[turn], mix[turn]", "alpha[0], beta[0], mix[0]"),
    ("part = at.part & (at.last_turn >= at.turn)", "part = at.part & (at.last_turn > at.turn)"),
    ("at.start + at.gate * x", "at.gate * x"),
    ("begins = [0] * b if attention_mask is None else attention_mask[:, :t].long().argmax(-1).tolist()", "begins = [0] * b"),
    ("noise=noise(places, self.config.hidden_size)", "noise=0.0 * noise(places, self.config.hidden_size)"),
    ("last = (share + self.bias).argmax(-1)", "last = share.argmax(-1)"),
]


def faults(place, names):
    """Each fault is put into the packages that have its line, until one of them differs."""
    unseen, missing = [], []
    for number, (line, fault) in enumerate(FAULTS):
        having = [name for name in names if line in (place / name / "modeling_dreamc.py").read_text()]
        noticed = False
        for name in having:
            broken = f"{name}_fault{number}"
            shutil.copytree(place / name, place / broken)
            shutil.copy(place / f"{name}.expected.safetensors", place / f"{broken}.expected.safetensors")
            code = place / broken / "modeling_dreamc.py"
            code.write_text(code.read_text().replace(line, fault))
            try:
                noticed = not check(place, broken, quick=True)
            except Exception as error:  # a model that does not run at all is noticed, too
                print(f"{broken}: {error}")
                noticed = True
            if noticed:
                break
        if not having:
            missing.append(line)
        elif not noticed:
            unseen.append(line)
    print(f"{len(FAULTS) - len(unseen) - len(missing)} of {len(FAULTS)} faults noticed; not: {unseen}; in no package: {missing}")
    return not unseen and not missing


if __name__ == "__main__":
    place = pathlib.Path(sys.argv[2])
    names = sorted(path.name.removesuffix(".expected.safetensors") for path in place.glob("*.expected.safetensors"))
    # Models are small, and so is the machine.
    torch.set_num_threads(1)
    good = [check(place, name) for name in names]
    print(f"{sum(good)} of {len(good)} packages")
    sound = sys.argv[1] == "each" or faults(place, names)
    sys.exit(0 if good and all(good) and sound else 1)
