"""Files of llama.cpp for `tests/numerics/gguf.rs`, by its own package.

    python tests/hf/ggufs.py make DIR           DIR/NAME/ of transformers with expected.safetensors, and DIR/NAME.gguf, which the
                                                package `gguf` writes from its tensors
    python tests/hf/ggufs.py read FILE DIR F    FILE has the tensors of DIR in the format F: those that the package packs, where it can
    python tests/hf/ggufs.py same A B           A has the numbers of B, which is f32: blocks, and the scales of their tensors
    python tests/hf/ggufs.py llama FILE IDS OUT the logits of llama.cpp for a row of ids, as numbers of 32 bits; needs llama-cpp-python

How names and orders of tensors are turned stands here once more, from llama.cpp's converter.
"""

import json
import pathlib
import sys

import numpy as np

SIZES = dict(vocab_size=97, max_position_embeddings=64, bos_token_id=1, eos_token_id=2, pad_token_id=None, hidden_size=64,
             num_attention_heads=4, num_key_value_heads=2, intermediate_size=96, num_hidden_layers=2)  # fmt: skip
ROPE = dict(rope_type="default", rope_theta=500.0)
LLAMA3 = dict(rope_type="llama3", rope_theta=500000.0, factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0,
              original_max_position_embeddings=8192)  # fmt: skip
LINEAR = dict(rope_type="linear", rope_theta=500.0, factor=4.0)
YARN = dict(rope_type="yarn", rope_theta=500.0, factor=4.0, original_max_position_embeddings=16, beta_fast=32.0, beta_slow=1.0)
EXPERTS = dict(num_experts=6, num_experts_per_tok=2)
# Names of transformers' classes, and their fields.
CASES = {
    "llama": ("Llama", SIZES | dict(rope_parameters=LLAMA3, tie_word_embeddings=True)),
    "llama_bias": ("Llama", SIZES | dict(rope_parameters=LINEAR, attention_bias=True, mlp_bias=True)),
    "llama_wide": ("Llama", SIZES | dict(rope_parameters=ROPE, hidden_size=256, intermediate_size=512)),
    "mixtral": ("Mixtral", SIZES | dict(rope_parameters=ROPE, num_local_experts=4, num_experts_per_tok=2, sliding_window=None)),
    "qwen2": ("Qwen2", SIZES | dict(rope_parameters=YARN, tie_word_embeddings=True)),
    "qwen3": ("Qwen3", SIZES | dict(rope_parameters=ROPE, head_dim=32)),
    "qwen2_moe": ("Qwen2Moe", SIZES | EXPERTS | dict(rope_parameters=ROPE, moe_intermediate_size=32, norm_topk_prob=False,
                                                      shared_expert_intermediate_size=64)),
    "qwen3_moe": ("Qwen3Moe", SIZES | EXPERTS | dict(rope_parameters=ROPE, head_dim=32, moe_intermediate_size=32, norm_topk_prob=True)),
    "olmoe": ("Olmoe", SIZES | EXPERTS | dict(rope_parameters=ROPE, num_key_value_heads=4, norm_topk_prob=False)),
    "olmo2": ("Olmo2", SIZES | dict(rope_parameters=ROPE)),
    "gemma2": ("Gemma2", SIZES | dict(rope_parameters=ROPE, num_hidden_layers=4, head_dim=16, query_pre_attn_scalar=16, sliding_window=6,
                                      attn_logit_softcapping=4.0, final_logit_softcapping=3.0)),
    "gemma3": ("Gemma3Text", SIZES | dict(num_hidden_layers=7, head_dim=16, query_pre_attn_scalar=16, sliding_window=6, rope_parameters=dict(
        full_attention=dict(ROPE, rope_theta=1e6), sliding_attention=dict(ROPE, rope_theta=1e4)))),
    "gpt_oss": ("GptOss", SIZES | dict(head_dim=16, num_local_experts=4, num_experts_per_tok=2, sliding_window=6,
                                       rope_parameters=dict(YARN, truncate=True))),
}  # fmt: skip
ARCHITECTURES = dict(llama="llama", mixtral="llama", mistral="llama", qwen2="qwen2", qwen2_moe="qwen2moe", qwen3="qwen3", qwen3_moe="qwen3moe",
                     olmoe="olmoe", olmo2="olmo2", gemma2="gemma2", gemma3_text="gemma3", gpt_oss="gpt-oss")  # fmt: skip
# Parts of a layer's names there and here.
NAMES = {
    "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v", "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm", "self_attn.k_norm": "attn_k_norm", "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm", "pre_feedforward_layernorm": "ffn_norm", "post_feedforward_layernorm": "post_ffw_norm",
    "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down", "mlp.gate": "ffn_gate_inp",
    "block_sparse_moe.gate": "ffn_gate_inp", "mlp.router": "ffn_gate_inp", "mlp.shared_expert.gate_proj": "ffn_gate_shexp",
    "mlp.shared_expert.up_proj": "ffn_up_shexp", "mlp.shared_expert.down_proj": "ffn_down_shexp",
    "mlp.shared_expert_gate": "ffn_gate_inp_shexp",
}  # fmt: skip
EXPERT = {"w1": "gate", "w3": "up", "w2": "down", "gate_proj": "gate", "up_proj": "up", "down_proj": "down"}


def tensors(folder):
    """The tensors that llama.cpp has for a folder of transformers, as f32, and the configuration."""
    from safetensors.torch import load_file

    config = json.loads((folder / "config.json").read_text())
    kind = config["model_type"]
    found, experts = {}, {}
    stored = {}
    for file in sorted(folder.glob("model*.safetensors")):
        stored |= load_file(file)
    for name, tensor in stored.items():
        x = tensor.float().numpy()
        if kind.startswith("gemma") and "norm" in name:
            x = x + np.float32(1)
        if name in ("model.embed_tokens.weight", "lm_head.weight", "model.norm.weight"):
            ours = {"model.embed_tokens.weight": "token_embd.weight", "lm_head.weight": "output.weight"}.get(name, "output_norm.weight")
            found[ours] = x
            continue
        _, _, number, rest = name.split(".", 3)
        layer = f"blk.{number}."
        if ".experts." in rest and kind != "gpt_oss":
            _, _, expert, which, _ = rest.rsplit(".", 4)
            experts.setdefault(f"{layer}ffn_{EXPERT[which]}_exps.weight", {})[int(expert)] = x
            continue
        if kind == "gpt_oss" and ".experts." in rest:
            bias = "_bias" in rest
            x = x if bias else x.swapaxes(1, 2)
            end = "bias" if bias else "weight"
            if "gate_up" in rest:
                found[f"{layer}ffn_gate_exps.{end}"], found[f"{layer}ffn_up_exps.{end}"] = x[:, ::2], x[:, 1::2]
            else:
                found[f"{layer}ffn_down_exps.{end}"] = x
            continue
        if rest == "self_attn.sinks":
            found[f"{layer}attn_sinks.weight"] = x
            continue
        part, end = rest.rsplit(".", 1)
        ours = NAMES[part]
        if part == "post_attention_layernorm" and (kind.startswith("gemma") or kind in ("olmo2", "gpt_oss")):
            ours = "post_attention_norm"
        if ARCHITECTURES[kind] == "llama" and ours in ("attn_q", "attn_k"):
            heads = config["num_attention_heads" if ours == "attn_q" else "num_key_value_heads"]
            x = x.reshape(heads, 2, len(x) // heads // 2, *x.shape[1:]).swapaxes(1, 2).reshape(x.shape)
        found[f"{layer}{ours}.{end}"] = x.reshape(-1) if ours == "ffn_gate_inp_shexp" else x
    for name, each in experts.items():
        found[name] = np.stack([each[i] for i in range(len(each))])
    scaling = config.get("rope_scaling") or config.get("rope_parameters") or {}
    if scaling.get("rope_type") == "llama3":
        import torch
        from transformers import AutoConfig
        from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

        own = AutoConfig.from_pretrained(folder)
        scaled, _ = ROPE_INIT_FUNCTIONS["llama3"](own, "cpu")
        size = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
        base = scaling.get("rope_theta") or config["rope_theta"]
        plain = 1.0 / base ** (torch.arange(0, size, 2, dtype=torch.int64).float() / size)
        found["rope_freqs.weight"] = (plain / scaled).numpy()
    if config.get("tie_word_embeddings") and kind in ("qwen2_moe", "olmoe", "olmo2", "gpt_oss"):
        found["output.weight"] = found["token_embd.weight"]
    return {n: np.ascontiguousarray(x) for n, x in found.items()}, config


def keys(writer, config, arch):
    rope = config.get("rope_parameters") or config
    full = rope.get("full_attention", rope)
    size = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(size)
    writer.add_value_length(size)
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_dimension_count(size)
    writer.add_rope_freq_base(full.get("rope_theta", 10000.0))
    writer.add_vocab_size(config["vocab_size"])
    experts = config.get("num_local_experts") or config.get("num_experts")
    if experts:
        writer.add_expert_count(experts)
        writer.add_expert_used_count(config["num_experts_per_tok"])
    if config.get("moe_intermediate_size"):
        writer.add_expert_feed_forward_length(config["moe_intermediate_size"])
    if config.get("shared_expert_intermediate_size"):
        writer.add_expert_shared_feed_forward_length(config["shared_expert_intermediate_size"])
    if arch == "gpt-oss":
        writer.add_expert_feed_forward_length(config["intermediate_size"])
    if config.get("attn_logit_softcapping"):
        writer.add_attn_logit_softcapping(config["attn_logit_softcapping"])
    if config.get("final_logit_softcapping"):
        writer.add_final_logit_softcapping(config["final_logit_softcapping"])
    if arch in ("gemma2", "gemma3", "gpt-oss"):
        writer.add_sliding_window(config["sliding_window"])
    if full.get("rope_type") in ("linear", "yarn"):
        import gguf

        writer.add_rope_scaling_type(gguf.RopeScalingType(full["rope_type"]))
        writer.add_rope_scaling_factor(full["factor"])
        if full["rope_type"] == "yarn":
            writer.add_rope_scaling_orig_ctx_len(full["original_max_position_embeddings"])


def make(place):
    import gguf
    import torch
    import transformers
    from families import logits, randomise
    from safetensors.torch import save_file

    for name, (kind, fields) in CASES.items():
        folder = place / name
        model = transformers.AutoModelForCausalLM.from_config(getattr(transformers, f"{kind}Config")(**fields))
        randomise(model, 7)
        model.save_pretrained(folder)
        ids = torch.randint(0, 97, (1, 24), generator=torch.Generator().manual_seed(3))
        save_file({"ids": ids, "logits": logits(folder, ids)}, str(folder / "expected.safetensors"))
        found, config = tensors(folder)
        arch = ARCHITECTURES[config["model_type"]]
        writer = gguf.GGUFWriter(str(place / f"{name}.gguf"), arch)
        keys(writer, config, arch)
        writer.add_tokenizer_model("none")
        for tensor, x in found.items():
            writer.add_tensor(tensor, x)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
    print(" ".join(CASES))


def numbers(reader):
    """Numbers of a file's tensors by their names, and their kinds: blocks by the scale of their tensor, or of each of its matrices."""
    import gguf

    found = {t.name: (gguf.dequantize(t.data, t.tensor_type).reshape(list(reversed(t.shape.tolist()))), t.tensor_type) for t in reader.tensors}
    for name in [n for n in found if n.endswith(".scale")]:
        scale, _ = found.pop(name)
        weight = name.removesuffix(".scale") + ".weight"
        x, kind = found[weight]
        found[weight] = (x * scale.reshape([-1] + [1] * (x.ndim - 1)), kind)
    return found


def same(file, other):
    import gguf

    ours, wanted = numbers(gguf.GGUFReader(file)), numbers(gguf.GGUFReader(other))
    if ours.keys() != wanted.keys():
        sys.exit(f"tensors {ours.keys() ^ wanted.keys()} are of one alone")
    for name, (x, _) in ours.items():
        right, kind = wanted[name]
        if kind != gguf.GGMLQuantizationType.F32 or x.shape != right.shape:
            sys.exit(f"{name} is {kind} {right.shape} and not {x.shape}")
        # A product is rounded, and so is another order of three factors.
        if not np.allclose(x, right, rtol=3e-7, atol=0):
            sys.exit(f"{name} differs by {np.abs(x - right).max()} of {np.abs(right).max()}")
    print(f"equal: {sum(kind.name == 'NVFP4' for _, kind in ours.values())} tensors of nvfp4")


def read(file, folder, form):
    import gguf

    wanted, config = tensors(folder)
    reader = gguf.GGUFReader(str(file))
    kinds = gguf.GGMLQuantizationType
    asked = kinds[form.upper()]
    names = [t.name for t in reader.tensors]
    if sorted(names) != sorted(wanted):
        sys.exit(f"tensors {set(names) ^ set(wanted)} are of one alone")
    packed = 0
    for t in reader.tensors:
        right = wanted[t.name]
        if list(reversed(t.shape.tolist())) != list(right.shape):
            sys.exit(f"{t.name} is {t.shape} and not {right.shape}")
        numbers = gguf.dequantize(t.data, t.tensor_type).reshape(right.shape)
        if t.tensor_type == asked and form != "f32":
            packed += 1
            try:
                right = gguf.dequantize(gguf.quantize(right, asked), asked)
            except NotImplementedError:
                # Super-blocks are not packed by the package: near, and read by it.
                worst = np.abs(numbers - right).max() / np.abs(right).max()
                if worst > {"q4_k": 0.2, "q6_k": 0.03}[form]:
                    sys.exit(f"{t.name} is {worst} away")
                continue
        elif t.tensor_type != kinds.F32:
            sys.exit(f"{t.name} is {t.tensor_type}")
        # Norms of Gemma are sums, and frequencies powers.
        same = np.array_equal(numbers, right) or "rope_freqs" in t.name and np.allclose(numbers, right, rtol=1e-5)
        if not same:
            sys.exit(f"{t.name} differs by {np.abs(numbers - right).max()} of {np.abs(right).max()}")
    arch = reader.fields["general.architecture"].contents()
    if arch != ARCHITECTURES[config["model_type"]]:
        sys.exit(f"the architecture is {arch}")
    if form != "f32" and packed == 0:
        sys.exit("no tensor is packed so")
    print("equal")


def llama(file, ids, out):
    import llama_cpp

    row = json.loads(pathlib.Path(ids).read_text())
    # Caches in f32, so that nothing is rounded but what the file's format asks for.
    model = llama_cpp.Llama(file, n_ctx=64, n_batch=64, n_ubatch=64, n_threads=1, n_threads_batch=1, logits_all=True, verbose=False,
                            type_k=0, type_v=0, flash_attn=False, use_mmap=True)  # fmt: skip
    model.eval(row)
    np.array(model.scores[: len(row)], dtype=np.float32).tofile(out)
    print(" ".join(str(id) for id in model.tokenize(b"the cat sat", add_bos=False)) if len(sys.argv) > 5 else "")


if __name__ == "__main__":
    if sys.argv[1] == "make":
        make(pathlib.Path(sys.argv[2]))
    elif sys.argv[1] == "same":
        same(*sys.argv[2:4])
    elif sys.argv[1] == "read":
        read(pathlib.Path(sys.argv[2]), pathlib.Path(sys.argv[3]), sys.argv[4])
    else:
        llama(*sys.argv[2:5])
