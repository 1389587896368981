"""Small random models of transformers for `tests/numerics/export.rs`, and the logits of exported folders.

    python tests/hf/families.py make DIR      DIR/NAME/ with config.json, model.safetensors and expected.safetensors, for each
    python tests/hf/families.py faults DIR    another value in the exported config.json gives other logits
    python tests/hf/families.py check DIR     the logits of DIR/NAME-back/ are those of DIR/NAME/, to the bit
    python tests/hf/families.py tuned DIR     every DIR/NAME-tuned/folder-back/, trained and exported, loads whole as the class that
                                              it came as; its logits go to DIR/NAME-tuned/said.safetensors

Models are as transformers saves them; fields that it did not write in earlier versions are taken out of some.
"""

import copy
import json
import os
import pathlib
import re
import sys

import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

COMMON = dict(vocab_size=97, max_position_embeddings=64, bos_token_id=1, eos_token_id=2, pad_token_id=None)
SIZES = dict(COMMON, hidden_size=24, num_attention_heads=4, num_key_value_heads=2, intermediate_size=40)
ROPE = dict(rope_type="default", rope_theta=500.0)
LLAMA3 = dict(rope_type="llama3", rope_theta=500.0, factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0,
              original_max_position_embeddings=32)
YARN = dict(rope_type="yarn", rope_theta=500.0, factor=4.0, original_max_position_embeddings=16, beta_fast=8.0, beta_slow=1.0)
LINEAR = dict(rope_type="linear", rope_theta=500.0, factor=3.0)
GEMMA = dict(SIZES, head_dim=8, sliding_window=6, query_pre_attn_scalar=6)
EXPERTS = dict(moe_intermediate_size=16, num_experts=6, num_experts_per_tok=3, norm_topk_prob=True)
LATENT = dict(SIZES, num_key_value_heads=4, num_hidden_layers=2, kv_lora_rank=12, qk_rope_head_dim=4, qk_nope_head_dim=6, v_head_dim=8,
              moe_intermediate_size=16, n_routed_experts=8, n_shared_experts=2, num_experts_per_tok=3, first_k_dense_replace=1)
NEMOTRON = dict(COMMON, hidden_size=24, num_attention_heads=4, num_key_value_heads=2, head_dim=8, intermediate_size=40, mamba_num_heads=6,
                mamba_head_dim=4, n_groups=2, ssm_state_size=5, conv_kernel=3, chunk_size=16, n_routed_experts=8, num_experts_per_tok=3,
                moe_intermediate_size=16, moe_shared_expert_intermediate_size=32, n_group=4, topk_group=2, routed_scaling_factor=2.5,
                layer_norm_epsilon=1e-3,
                # Its class raises steps to this; its authors' code does not.
                time_step_min=1e-12)
GRANITE = dict(SIZES, intermediate_size=16, shared_intermediate_size=32, num_local_experts=6, num_experts_per_tok=3, mamba_n_heads=6,
               mamba_n_groups=2, mamba_d_state=5, mamba_chunk_size=16, rms_norm_eps=1e-3, embedding_multiplier=3.0,
               attention_multiplier=0.3, residual_multiplier=0.6, logits_scaling=3.0)
KIMI = dict(COMMON, hidden_size=24, num_attention_heads=4, num_key_value_heads=4, intermediate_size=40, moe_intermediate_size=16,
            num_local_experts=8, num_experts_per_tok=3, n_shared_experts=2, n_group=4, topk_group=2, kv_lora_rank=12, qk_rope_head_dim=4,
            qk_nope_head_dim=6, v_head_dim=8, linear_num_heads=3, linear_head_dim=6, linear_conv_kernel_dim=3, rms_norm_eps=1e-3)

MODELS = {
    "llama": ("LlamaConfig", dict(SIZES, num_hidden_layers=2, rope_parameters=LLAMA3)),
    "gemma2": ("Gemma2Config", dict(GEMMA, num_hidden_layers=3, attn_logit_softcapping=4.0, rope_parameters=ROPE)),
    "qwen3": ("Qwen3Config", dict(SIZES, num_hidden_layers=3, head_dim=8, use_sliding_window=True, sliding_window=5,
                                  max_window_layers=1, tie_word_embeddings=True, rope_parameters=ROPE)),
    "llama_bias": ("LlamaConfig", dict(SIZES, num_hidden_layers=2, attention_bias=True, mlp_bias=True, rope_parameters=LINEAR)),
    "qwen2": ("Qwen2Config", dict(SIZES, num_hidden_layers=3, use_sliding_window=True, sliding_window=5, max_window_layers=1,
                                  tie_word_embeddings=True, rope_parameters=ROPE)),
    "qwen2_yarn": ("Qwen2Config", dict(SIZES, num_hidden_layers=2, max_window_layers=2, rope_parameters=YARN)),
    "qwen2_moe": ("Qwen2MoeConfig", dict(SIZES, **EXPERTS, shared_expert_intermediate_size=48, num_hidden_layers=4,
                                         decoder_sparse_step=2, mlp_only_layers=[1], rope_parameters=ROPE)),
    "qwen2_moe_plain": ("Qwen2MoeConfig", dict(SIZES | EXPERTS, intermediate_size=5632, shared_expert_intermediate_size=16, num_hidden_layers=2,
                                               qkv_bias=False, rope_parameters=dict(YARN, truncate=False, mscale=1.5,
                                                                                    mscale_all_dim=0.5))),
    "mixtral": ("MixtralConfig", dict(SIZES, num_hidden_layers=2, num_local_experts=4, num_experts_per_tok=2,
                                      sliding_window=7, rope_parameters=ROPE)),
    "olmoe": ("OlmoeConfig", dict(SIZES, num_hidden_layers=2, num_experts=6, num_experts_per_tok=3, rope_parameters=ROPE)),
    "mistral": ("MistralConfig", dict(SIZES, num_hidden_layers=3, head_dim=8, sliding_window=6, rope_parameters=ROPE)),
    "mistral_full": ("MistralConfig", dict(SIZES, num_hidden_layers=2, sliding_window=None, rope_parameters=ROPE)),
    "phi3": ("Phi3Config", dict(SIZES, num_hidden_layers=2, sliding_window=9, rope_parameters=ROPE)),
    "qwen3_moe": ("Qwen3MoeConfig", dict(SIZES, **EXPERTS, num_hidden_layers=4, head_dim=8, decoder_sparse_step=2,
                                         mlp_only_layers=[1], rope_parameters=ROPE)),
    "olmo2": ("Olmo2Config", dict(SIZES, num_hidden_layers=2, rope_parameters=ROPE)),
    "olmo2_bias": ("Olmo2Config", dict(SIZES, num_hidden_layers=2, attention_bias=True, tie_word_embeddings=True,
                                       rope_parameters=YARN)),
    "olmo3": ("Olmo3Config", dict(SIZES, num_hidden_layers=5, sliding_window=6, rope_parameters=dict(
        full_attention=YARN, sliding_attention=ROPE))),
    "olmo3_one": ("Olmo3Config", dict(SIZES, num_hidden_layers=4, sliding_window=5, rope_parameters=dict(
        full_attention=dict(YARN, rope_theta=500000.0), sliding_attention=dict(rope_type="default", rope_theta=500000.0)))),
    "gpt_oss": ("GptOssConfig", dict(SIZES, head_dim=8, num_hidden_layers=3, sliding_window=6, num_local_experts=6,
                                     num_experts_per_tok=3, rope_parameters=dict(YARN, truncate=False))),
    "dots1": ("Dots1Config", dict(SIZES, num_hidden_layers=3, moe_intermediate_size=16, n_routed_experts=8, n_shared_experts=2,
                                  num_experts_per_tok=3, n_group=4, topk_group=2, first_k_dense_replace=1, norm_topk_prob=True,
                                  routed_scaling_factor=2.5, sliding_window=None, rope_parameters=ROPE)),
    "deepseek_v2": ("DeepseekV2Config", dict(LATENT, rms_norm_eps=1e-3, q_lora_rank=None, topk_method="greedy", rope_parameters=dict(
        YARN, mscale=0.7, mscale_all_dim=0.7))),
    "deepseek_v3": ("DeepseekV3Config", dict(LATENT, rms_norm_eps=1e-4, q_lora_rank=10, n_group=4, topk_group=2, norm_topk_prob=True,
                                             routed_scaling_factor=2.5, num_mtp_layers=0, rope_parameters=ROPE)),
    "bamba": ("BambaConfig", dict(SIZES, num_attention_heads=3, num_key_value_heads=1, num_hidden_layers=3, attn_layer_indices=[1], mamba_n_heads=6, mamba_n_groups=2, mamba_d_state=5,
                                  mamba_chunk_size=16, rms_norm_eps=1e-3, rope_parameters=ROPE)),
    "falcon_h1": ("FalconH1Config", dict(SIZES, num_hidden_layers=2, mamba_d_ssm=36, mamba_n_heads=6, mamba_d_head=6, mamba_n_groups=2, mamba_d_state=5,
                                         mamba_d_conv=3, mamba_chunk_size=16, rms_norm_eps=1e-3, rope_parameters=ROPE, embedding_multiplier=3.0,
                                         lm_head_multiplier=0.4, mlp_multipliers=[0.8, 0.6], key_multiplier=0.7, attention_in_multiplier=1.3,
                                         attention_out_multiplier=0.9, ssm_multipliers=[0.7, 0.5, 0.9, 1.4, 1.2], ssm_in_multiplier=1.25,
                                         ssm_out_multiplier=0.6)),
    "granite": ("GraniteMoeHybridConfig", dict(GRANITE, num_hidden_layers=3, layer_types=["linear_attention", "full_attention",
                                                                                         "linear_attention"])),
    "granite_dense": ("GraniteMoeHybridConfig", dict(GRANITE, num_hidden_layers=2, layer_types=["linear_attention", "full_attention"],
                                                     num_local_experts=0, position_embedding_type="rope", rope_parameters=ROPE)),
    "qwen3_next": ("Qwen3NextConfig", dict(SIZES, **EXPERTS, head_dim=16, num_hidden_layers=4, layer_types=None, mlp_only_layers=[1],
                                           shared_expert_intermediate_size=32, linear_num_key_heads=2, linear_num_value_heads=6,
                                           linear_key_head_dim=5, linear_value_head_dim=4, linear_conv_kernel_dim=3, rms_norm_eps=1e-3,
                                           rope_parameters=dict(ROPE, partial_rotary_factor=0.25))),
    "nemotron_h": ("NemotronHConfig", dict(NEMOTRON, layers_block_type=[
        "linear_attention", "mlp", "linear_attention", "moe", "full_attention", "moe", "linear_attention"])),
    "nemotron_h_dense": ("NemotronHConfig", dict(NEMOTRON, n_groups=1, layers_block_type=["linear_attention", "mlp", "full_attention", "mlp"])),
    "kimi_linear": ("KimiLinearConfig", dict(KIMI, num_hidden_layers=5, q_lora_rank=None)),
    "kimi_linear_short": ("KimiLinearConfig", dict(KIMI, num_hidden_layers=3, q_lora_rank=10, mlp_layer_types=["dense", "dense", "sparse"],
                                                   layer_types=["full_attention", "linear_attention", "full_attention"])),
    "gemma3": ("Gemma3TextConfig", dict(GEMMA, num_hidden_layers=7, layer_types=None, rope_parameters=dict(
        full_attention=dict(rope_type="default", rope_theta=900.0),
        sliding_attention=dict(rope_type="default", rope_theta=70.0)))),
    "gemma3_caps": ("Gemma3TextConfig", dict(GEMMA, num_hidden_layers=2, final_logit_softcapping=5.0, rope_parameters=dict(
        full_attention=dict(rope_type="default", rope_theta=900.0),
        sliding_attention=dict(rope_type="default", rope_theta=70.0)))),
    "gemma3_linear": ("Gemma3TextConfig", dict(GEMMA, num_hidden_layers=7, rope_parameters=dict(
        full_attention=LINEAR, sliding_attention=dict(rope_type="default", rope_theta=70.0)))),
    "llama_gelu": ("LlamaConfig", dict(SIZES, num_hidden_layers=2, hidden_act="gelu", rope_parameters=ROPE)),
    "llama_gelu_tanh": ("LlamaConfig", dict(SIZES, num_hidden_layers=2, hidden_act="gelu_pytorch_tanh", rope_parameters=ROPE)),
}

SEEDS = {name: seed for seed, name in enumerate(MODELS)}
# Draws whose gradients move by less than 4e-5 where every weight moves in its last bit; others move by 1e-3.
SEEDS |= {"bamba": 128, "qwen3_next": 30, "kimi_linear": 128, "kimi_linear_short": 110}
# Those whose names begin so, with commas between, where it is set.
if only := os.environ.get("DREAMC_FAMILY"):
    MODELS = {name: model for name, model in MODELS.items() if name.startswith(tuple(only.split(",")))}


def randomise(model, seed):
    """Weights large enough that caps, windows and norms matter; no gain and no bias is what it begins as."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, p in model.named_parameters():
            normal = torch.randn(p.shape, generator=generator)
            if p.dim() == 1:
                p.add_(0.2 * normal)
            elif name.endswith("gate_up_proj_bias"):
                p.copy_(6.0 * normal)  # some beyond the limits of 7
            else:
                p.copy_(normal * (1.0 if "embed" in name else 1.5 / p.shape[-1] ** 0.5))
        for name, p in model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                p.add_(0.2 * torch.randn(p.shape, generator=generator))


def logits(folder, ids):
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    with torch.no_grad():
        return model.eval()(ids).logits.float().contiguous()


def greedy(folder, prompts):
    """Prompts and the likeliest tokens behind them, from a cache."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
    model.generation_config.eos_token_id = None
    return model.generate(prompts, attention_mask=torch.ones_like(prompts), do_sample=False, max_new_tokens=8)


def gradients(folder, ids):
    """A folder of gradients of the mean loss, in the place of weights."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
    found = model(ids[:, :-1]).logits
    torch.nn.functional.cross_entropy(found.flatten(0, 1), ids[:, 1:].flatten()).backward()
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(torch.zeros_like(p) if p.grad is None else p.grad)
    model.save_pretrained(folder / "gradients")


def published(file):
    """Dense networks under the names of the authors' files: version 5 writes those of experts, as it does in `gradients`."""
    pattern = re.compile(r"block_sparse_moe\.((?:gate|up|down)_proj)")
    tensors = {pattern.sub(r"mlp.\1", name): tensor for name, tensor in load_file(file).items()}
    save_file(tensors, str(file), metadata={"format": "pt"})


def make(place):
    for name, (config, fields) in MODELS.items():
        folder, seed = place / name, SEEDS[name]
        # Configurations write into the objects that they are given.
        config = getattr(transformers, config)(**copy.deepcopy(fields))
        torch.manual_seed(seed)  # vectors of recurrences begin at random numbers, which `randomise` moves
        model = AutoModelForCausalLM.from_config(config)
        randomise(model, seed)
        model.save_pretrained(folder)
        if name.startswith("kimi"):
            published(folder / "model.safetensors")
        ids = torch.randint(0, 97, (2, 24), generator=torch.Generator().manual_seed(seed))
        expected = {"ids": ids, "logits": logits(folder, ids), "greedy": greedy(folder, ids[:, :11])}
        save_file(expected, str(folder / "expected.safetensors"))
        gradients(folder, ids)


def written(found, right):
    """Values that were left to their defaults are written; `mscale` is in `attention_factor`, and all of a head turns."""
    inner = lambda key, x: written(found.get(key, {}), x) if isinstance(x, dict) else found.get(key)
    return {key: inner(key, x) for key, x in right.items() if not key.startswith(("mscale", "partial_rotary_factor"))}


def check(place):
    for name in MODELS:
        expected = load_file(place / name / "expected.safetensors")
        # Of the same process: sums over experts are of another order in another one.
        first, found = (logits(place / folder, expected["ids"]) for folder in (name, f"{name}-back"))
        if not torch.equal(found, first):
            sys.exit(f"{name}: logits differ by {(found - first).abs().max()}")
        ours = json.loads((place / f"{name}-new" / "config.json").read_text())
        theirs = transformers.AutoConfig.from_pretrained(place / name)
        back = transformers.AutoConfig.from_pretrained(place / f"{name}-new")
        # What is written where no file was kept is the same model to transformers, perhaps of a simpler class.
        free = {"bos_token_id", "eos_token_id", "pad_token_id", "architectures", "torch_dtype", "head_dim", "model_type",
                "mlp_only_layers", "decoder_sparse_step", "attention_bias", "mlp_bias", "moe_layer_freq", "topk_method", "scoring_func",
                "first_k_dense_replace", "linear_attn_config", "moe_router_activation_func", "normalization_function",
                "position_embedding_type"}
        for field in set(ours) - free:
            found, right = getattr(back, field, None), getattr(theirs, field, None)
            if field in ("rope_scaling", "rope_parameters"):
                found, right = written(found, right), written(right, right)
            if found != right:
                sys.exit(f"{name}: {field} is {found}, was {right}")
        if not torch.allclose(logits(place / f"{name}-new", expected["ids"]), expected["logits"], rtol=1e-5, atol=1e-5):
            sys.exit(f"{name}: a config.json that is made anew gives other logits")
    print(f"{len(MODELS)} models")


def tuned(place):
    for name in MODELS:
        folder = place / f"{name}-tuned" / "folder-back"
        ids = load_file(place / name / "expected.safetensors")["ids"]
        model, said = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
        wrong = {key: list(names) for key, names in said.items() if names}
        before = json.loads((place / name / "config.json").read_text())["architectures"]
        if wrong or [type(model).__name__] != before:
            sys.exit(f"{name}: loads as {type(model).__name__} with {wrong}")
        save_file({"ids": ids, "logits": logits(folder, ids)}, str(place / f"{name}-tuned" / "said.safetensors"))
    print(f"{len(MODELS)} tuned models")


def faults(place):
    """Every quantity of a config.json that was made anew matters: with another value the logits are others."""
    other = {
        "rms_norm_eps": lambda x: 0.05, "rope_theta": lambda x: 2 * x, "rope_local_base_freq": lambda x: 2 * x,
        "query_pre_attn_scalar": lambda x: x + 1, "attn_logit_softcapping": lambda x: 2.0, "final_logit_softcapping": lambda x: 2.0,
        "rope_scaling": lambda x: x | {"factor": 2 * x["factor"]}, "norm_topk_prob": lambda x: not x, "qkv_bias": lambda x: not x,
        "num_experts_per_tok": lambda x: x - 1, "swiglu_limit": lambda x: 1.0, "swiglu_alpha": lambda x: 1.0,
        "embedding_multiplier": lambda x: x + 1.0, "attention_multiplier": lambda x: 2 * x, "residual_multiplier": lambda x: 2 * x,
        "logits_scaling": lambda x: 2 * x, "layer_norm_epsilon": lambda x: 0.1, "moe_renormalize": lambda x: not x,
        "num_experts_per_token": lambda x: x - 1,
        "topk_group": lambda x: x + 1, "routed_scaling_factor": lambda x: x + 0.5,
        "rope_parameters": lambda x: x | {"sliding_attention": x["sliding_attention"] | {"rope_theta": 77.0}}, "sliding_window": lambda x: x + 1 if x else 3,
    }
    count, unseen = 0, []
    for name in MODELS:
        expected = load_file(place / name / "expected.safetensors")
        path = place / f"{name}-new" / "config.json"
        text = path.read_text()
        config = json.loads(text)
        for field, change in other.items():
            if field not in config or field == "sliding_window" and not config.get("use_sliding_window", True):
                continue
            if field == "rope_theta" and "full_attention" not in config.get("layer_types", ["full_attention"]):
                continue
            if field == "norm_topk_prob" and config["model_type"] == "deepseek_v2":
                continue  # its class does not read it
            if field == "sliding_window" and config["model_type"] == "dots1":
                continue  # its windows begin after the last layer
            if field == "qkv_bias" and not config[field]:
                continue  # biases that are added begin at 0
            path.write_text(json.dumps(config | {field: change(config[field])}))
            found = logits(place / f"{name}-new", expected["ids"])
            path.write_text(text)
            count += 1
            if torch.allclose(found, expected["logits"], rtol=1e-4, atol=1e-4):
                unseen.append(f"{name}: {field} makes no difference")
    if unseen:
        sys.exit("\n".join(unseen))
    print(f"{count} faults noticed")


if __name__ == "__main__":
    {"make": make, "check": check, "tuned": tuned, "faults": faults}[sys.argv[1]](pathlib.Path(sys.argv[2]))
