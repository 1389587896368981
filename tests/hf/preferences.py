"""Preferences for `tests/numerics/preferences.rs`: a LoRA on a small random Llama, and DPO by its formula in PyTorch.

    python tests/hf/preferences.py make DIR      DIR/base/ a model, DIR/lora/ its adapter, and expected.safetensors there: ids and targets of
                                                 two pairs, the reference of each, loss and gradients of the adapter, and of whole weights
    python tests/hf/preferences.py trl DIR       the same loss and gradients by DPOTrainer of TRL, where that is installed, beside them
"""

import pathlib
import sys

import torch
import torch.nn.functional as F
import transformers
from families import MODELS
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

BETA, SMOOTHING = 0.3, 0.1
# Tokens of the prompt, of the chosen and of the rejected answer.
PAIRS = [(3, 5, 7), (4, 6, 2)]
SEQUENCE = 12


def load(folder):
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()


def rows():
    """Ids and targets, -1 where no loss is taken: the last token of an answer is a target and no input."""
    draw = torch.Generator().manual_seed(5)
    ids, targets = torch.full((2 * len(PAIRS), SEQUENCE), 2), torch.full((2 * len(PAIRS), SEQUENCE), -1)
    for pair, (prompt, *answers) in enumerate(PAIRS):
        asked = torch.randint(3, 97, (prompt,), generator=draw)
        for side, length in enumerate(answers):
            text = torch.cat([asked, torch.randint(3, 97, (length,), generator=draw)])
            row = 2 * pair + side
            ids[row, : len(text) - 1] = text[:-1]
            targets[row, prompt - 1 : len(text) - 1] = text[prompt:]
    return ids, targets


def answers(model, ids, targets):
    """`ln π` of each row's answer."""
    logits = model(ids).logits.log_softmax(-1)
    each = logits.gather(-1, targets.clamp(min=0).unsqueeze(-1)).squeeze(-1)
    return (each * (targets >= 0)).sum(-1)


def dpo(model, reference, ids, targets, smoothing=SMOOTHING):
    found = answers(model, ids, targets)
    z = BETA * (found[0::2] - found[1::2] - reference)
    return (-(1 - smoothing) * F.logsigmoid(z) - smoothing * F.logsigmoid(-z)).mean()


def make(at):
    torch.manual_seed(0)
    kind, fields = MODELS["llama"]
    AutoModelForCausalLM.from_config(getattr(transformers, kind)(**fields)).save_pretrained(at / "base")
    modules = ["q_proj", "v_proj", "o_proj", "down_proj"]
    config = LoraConfig(r=3, lora_alpha=6, target_modules=modules, task_type="CAUSAL_LM")
    adapted = get_peft_model(load(at / "base"), config)
    for key, weight in adapted.named_parameters():
        if "lora_B" in key:
            torch.nn.init.normal_(weight, std=0.2)
    adapted.save_pretrained(at / "lora")
    ids, targets = rows()
    with torch.no_grad():
        found = answers(load(at / "base"), ids, targets)
    reference = found[0::2] - found[1::2]
    loss = dpo(adapted, reference, ids, targets)
    loss.backward()
    grads = {k.replace(".default", ""): p.grad for k, p in adapted.named_parameters() if p.grad is not None}
    save_file({"ids": ids, "targets": targets, "reference": reference, "loss": loss.detach().reshape(1), **grads}, at / "lora" / "expected.safetensors")
    # Whole weights, another reference.
    whole = load(at / "base")
    loss = dpo(whole, reference + 0.5, ids, targets)
    loss.backward()
    grads = {k: p.grad for k, p in whole.named_parameters() if p.grad is not None}
    save_file({"loss": loss.detach().reshape(1), **grads}, at / "base" / "expected.safetensors")


def trl(at):
    from datasets import Dataset
    from trl import DPOConfig, DPOTrainer

    reference = load_file(at / "lora" / "expected.safetensors")["reference"]
    model = PeftModel.from_pretrained(load(at / "base"), at / "lora", is_trainable=True)
    ids, targets = rows()
    # Its loss has no smoothing of this form.
    formula = dpo(model, reference, ids, targets, 0.0)
    formula.backward()
    expected = {k: p.grad.clone() for k, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    data = {"prompt_ids": [], "chosen_ids": [], "rejected_ids": []}
    for pair, (prompt, *lengths) in enumerate(PAIRS):
        for side, (name, length) in enumerate(zip(("chosen_ids", "rejected_ids"), lengths)):
            row = 2 * pair + side
            last = targets[row, prompt + length - 2]
            text = [*ids[row, : prompt + length - 1].tolist(), int(last)]
            data[name].append(text[prompt:])
        data["prompt_ids"].append(text[:prompt])
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=words(), pad_token="<p>", eos_token="<e>")
    config = DPOConfig(output_dir=str(at / "trl"), beta=BETA, loss_type=["sigmoid"], report_to=[], use_cpu=True, bf16=False,
                       per_device_train_batch_size=len(PAIRS), gradient_checkpointing=False, disable_dropout=True)  # fmt: skip
    trainer = DPOTrainer(model=model, ref_model=load(at / "base"), args=config, train_dataset=Dataset.from_dict({"prompt": ["a"], "chosen": ["b"], "rejected": ["c"]}), processing_class=tokenizer)
    columns = [{k: v[i] for k, v in data.items()} for i in range(len(PAIRS))]
    batch = trainer.data_collator(columns)
    loss = trainer.compute_loss(trainer.model, batch)
    loss.backward()
    print(f"loss {float(loss):.7f}, by the formula {float(formula):.7f}")
    grads = {k: p.grad for k, p in trainer.model.named_parameters() if p.grad is not None}
    largest = max(float(g.abs().max()) for g in expected.values())
    worst = max(float((grads[k] - g).abs().max()) for k, g in expected.items())
    print(f"gradients differ by {worst:.1e} of {largest:.1e}")


def words():
    from tokenizers import Tokenizer, models, pre_tokenizers

    vocab = {"<p>": 0, "<e>": 1, "<u>": 2} | {chr(97 + i): 3 + i for i in range(26)}
    tokenizer = Tokenizer(models.WordLevel(vocab, unk_token="<u>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    return tokenizer


if __name__ == "__main__":
    {"make": make, "trl": trl}[sys.argv[1]](pathlib.Path(sys.argv[2]))
