"""Adapters of peft for `tests/numerics/adapters.rs`: LoRA on small random models, and what peft computes with ours.

    python tests/hf/adapters.py make DIR      DIR/NAME/ a model, DIR/NAME-lora/ its adapter, with expected.safetensors: ids, logits, and
                                              the gradients of the mean loss with respect to every factor
    python tests/hf/adapters.py check DIR     DIR/NAME-back/, exported, loads whole on DIR/NAME/; its logits are those of DIR/NAME-lora/
                                              to the bit, and so are its factors
    python tests/hf/adapters.py logits DIR    logits of DIR/NAME-tuned/, trained and exported, go to DIR/NAME-tuned.safetensors
"""

import pathlib
import sys

import torch
from families import MODELS
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
import transformers
from transformers import AutoModelForCausalLM

# Families, the modules that are adapted, and more settings.
CASES = {
    "llama": (["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"], {}),
    "qwen3": (["q_proj", "v_proj"], dict(use_rslora=True)),
    "gemma2": (["o_proj", "down_proj"], dict(lora_alpha=3)),
    "olmo2": (["k_proj", "up_proj"], {}),
    "llama-dora": (["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"], dict(use_dora=True)),
    "qwen2-dora": (["q_proj", "v_proj", "down_proj"], dict(use_dora=True, use_rslora=True)),
}


def model(folder):
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()


def make(at):
    for seed, (name, (modules, more)) in enumerate(CASES.items()):
        torch.manual_seed(seed)
        kind, fields = MODELS[name.removesuffix("-dora")]
        base = AutoModelForCausalLM.from_config(getattr(transformers, kind)(**fields), attn_implementation="eager").eval()
        base.save_pretrained(at / name)
        config = LoraConfig(**dict(dict(r=3, lora_alpha=5, target_modules=modules, task_type="CAUSAL_LM"), **more))
        adapted = get_peft_model(model(at / name), config)
        for key, weight in adapted.named_parameters():
            if "lora_B" in key:
                torch.nn.init.normal_(weight, std=0.2)
            if "magnitude" in key:
                weight.data *= 1 + 0.3 * torch.randn_like(weight)
        adapted.save_pretrained(at / f"{name}-lora")
        ids = torch.randint(3, 97, (2, 13))
        logits = adapted(ids).logits
        loss = torch.nn.functional.cross_entropy(logits[:, :-1].reshape(-1, logits.shape[-1]), ids[:, 1:].reshape(-1))
        loss.backward()
        grads = {saved(k): p.grad for k, p in adapted.named_parameters() if p.grad is not None}
        assert grads and all("lora_" in k for k in grads)
        save_file({"ids": ids, "logits": logits.detach(), **grads}, at / f"{name}-lora" / "expected.safetensors")


def saved(key):
    """The name of a parameter in the file of an adapter."""
    key = key.replace(".default", "")
    return key.removesuffix(".weight") if "magnitude" in key else key


def loaded(at, name, adapter):
    found = PeftModel.from_pretrained(model(at / name), at / adapter).eval()
    ours = load_file(at / adapter / "adapter_model.safetensors")
    own = {saved(k): v for k, v in found.state_dict().items() if "lora_" in k}
    assert own.keys() == ours.keys(), own.keys() ^ ours.keys()
    assert all(torch.equal(v, ours[k]) for k, v in own.items())
    return found


def check(at):
    for name in CASES:
        expected = load_file(at / f"{name}-lora" / "expected.safetensors")
        theirs, ours = (load_file(at / f"{name}-{which}" / "adapter_model.safetensors") for which in ("lora", "back"))
        assert theirs.keys() == ours.keys(), name
        assert all(torch.equal(theirs[k], ours[k]) for k in theirs), name
        logits = loaded(at, name, f"{name}-back")(expected["ids"].long()).logits
        worst = (logits - expected["logits"]).abs().max()
        assert worst < 1e-5, f"{name}: {worst}"
    print(f"{len(CASES)} adapters")


def logits(at):
    for name in CASES:
        ids = load_file(at / f"{name}-lora" / "expected.safetensors")["ids"]
        with torch.no_grad():
            found = loaded(at, name, f"{name}-tuned")(ids.long()).logits
        save_file({"logits": found}, at / f"{name}-tuned.safetensors")
    print(f"{len(CASES)} adapters")


if __name__ == "__main__":
    {"make": make, "check": check, "logits": logits}[sys.argv[1]](pathlib.Path(sys.argv[2]))
