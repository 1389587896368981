//! Imports that were trained and leave again, one of every family.

use crate::export::{Expected, Found, drawn, real, tensors, write};
use crate::import::{CASES, folder, good};
use dreamc_dsl::Spelling;
use dreamc_hf::config::Config;
use dreamc_hf::family::FAMILIES;
use dreamc_hf::hugging_face;
use dreamc_runtime::checkpoint::safetensors::Dtype;
use serde_json::{Map, Value, json};
use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::Path;

const TEXT: &str = "the cat and the hat in the rain , and then again\n";

/// The folder `from`, with a tokenizer of the words of [`TEXT`].
fn with_tokenizer(from: &Path, to: &Path) {
    fs::create_dir_all(to).unwrap();
    let passed = |name: &str| name.ends_with(".safetensors") || name.ends_with(".json");
    for entry in fs::read_dir(from).unwrap().flatten() {
        let name = entry.file_name().to_string_lossy().into_owned();
        if passed(&name) && name != "expected.safetensors" {
            fs::copy(entry.path(), to.join(name)).unwrap();
        }
    }
    let mut vocab: Map<String, Value> = Map::new();
    for word in ["<unk>", "<s>", "</s>"].into_iter().chain(TEXT.split_whitespace()) {
        let next = vocab.len();
        vocab.entry(word).or_insert(next.into());
    }
    let special = |id: u64, content: &str| {
        json!({"id": id, "content": content, "single_word": false, "lstrip": false, "rstrip": false,
               "normalized": false, "special": true})
    };
    let tokenizer = json!({
        "version": "1.0", "truncation": null, "padding": null, "normalizer": null, "post_processor": null, "decoder": null,
        "added_tokens": [special(0, "<unk>"), special(1, "<s>"), special(2, "</s>")],
        "pre_tokenizer": {"type": "Whitespace"},
        "model": {"type": "WordLevel", "vocab": vocab, "unk_token": "<unk>"}
    });
    fs::write(to.join("tokenizer.json"), tokenizer.to_string()).unwrap();
}

/// Imports a folder of `transformers`, trains it for two steps, by its folder and by a
/// specification with `base:`, and exports both runs, all in `at`. Returns the words of
/// `dreamc export`.
pub fn tune(from: &Path, at: &Path) -> [(&'static str, String); 2] {
    let recipe =
        ["--set", "train.steps=2", "--set", "train.batch=2", "--set", "train.sequence=16", "--quiet"];
    with_tokenizer(from, &at.join("from"));
    fs::write(at.join("text.txt"), TEXT.repeat(40)).unwrap();
    fs::write(at.join("tuned.yaml"), "base: model\ndata: {text: text.txt}\n").unwrap();
    hugging_face(&at.join("from"), &at.join("model"), "model", false, &[])
        .unwrap_or_else(|e| panic!("{}: {e}", from.display()));
    let lines =
        [("folder", ["train", "model", "--data", "text.txt"].as_slice()), ("base", &["train", "tuned.yaml"])];
    lines.map(|(run, line)| {
        good(at, &[line, &["--out", run], &recipe].concat());
        (run, good(at, &["export", "hf", run, "-o", &format!("{run}-back")]))
    })
}

/// Imports, trains and exports a folder of `transformers`: what leaves has its class, the fields of
/// its `config.json`, the names, types and shapes of its tensors, and other weights.
pub fn tuned_leave_as_they_came(from: &Path, at: &Path) {
    let case = from.display();
    for (run, said) in tune(from, at) {
        assert!(!said.contains("no class of transformers"), "{case}, {run}: {said}");
        let (came, left) = (tensors(&at.join("from")), tensors(&at.join(format!("{run}-back"))));
        let kinds = |all: &BTreeMap<String, Found>| -> Vec<_> {
            all.iter().map(|(name, (kind, shape, _))| (name.clone(), kind.clone(), shape.clone())).collect()
        };
        let config = |folder: &str| -> Value {
            serde_json::from_str(&fs::read_to_string(at.join(folder).join("config.json")).unwrap()).unwrap()
        };
        assert_eq!(kinds(&came), kinds(&left), "{case}, {run}");
        assert_eq!(config("from"), config(&format!("{run}-back")), "{case}, {run}");
        let learned = came.iter().any(|(name, tensor)| left[name] != *tensor);
        assert!(learned, "{case}, {run}: nothing was learned");
    }
}

/// The fields that most of the small configurations share.
fn common() -> Value {
    json!({"vocab_size": 97, "hidden_size": 24, "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 40,
           "max_position_embeddings": 64, "num_hidden_layers": 2, "rms_norm_eps": 1e-6,
           "attention_dropout": 0.0, "initializer_range": 0.02, "bos_token_id": 1, "eos_token_id": 2, "use_cache": true,
           "rope_theta": 500.0, "rope_scaling": null, "tie_word_embeddings": false, "torch_dtype": "bfloat16"})
}

/// `config.json` of a small model of each family that has no folder in `tests/import`, with the
/// fields that its authors publish.
fn small() -> Vec<Value> {
    let yarn = json!({"rope_type": "yarn", "factor": 4.0, "beta_fast": 8.0, "beta_slow": 1.0,
                      "original_max_position_embeddings": 16, "truncate": false});
    let (local, full) = ("sliding_attention", "full_attention");
    let experts = json!({"moe_intermediate_size": 16, "num_experts": 6, "num_experts_per_tok": 3, "norm_topk_prob": true,
                         "decoder_sparse_step": 1, "mlp_only_layers": [], "output_router_logits": false,
                         "router_aux_loss_coef": 0.001, "use_sliding_window": false});
    let later = json!({"moe_intermediate_size": 16, "n_routed_experts": 8, "n_shared_experts": 2, "num_experts_per_tok": 3,
                       "first_k_dense_replace": 1, "moe_layer_freq": 1, "attention_bias": false,
                       "num_key_value_heads": 4});
    let latent = json!({"kv_lora_rank": 12, "qk_rope_head_dim": 4, "qk_nope_head_dim": 6, "v_head_dim": 8,
                        "pretraining_tp": 1, "ep_size": 1});
    let hybrid = json!({"attention_bias": false});
    let families = [
        vec![
            json!({"model_type": "gemma3_text", "head_dim": 8, "hidden_activation": "gelu_pytorch_tanh", "sliding_window": 6,
                    "layer_types": [local, local, full], "num_hidden_layers": 3, "query_pre_attn_scalar": 6,
                    "rope_local_base_freq": 70.0, "tie_word_embeddings": true}),
        ],
        vec![json!({"model_type": "mistral", "head_dim": 8, "sliding_window": null})],
        vec![
            json!({"model_type": "phi3", "sliding_window": 9, "original_max_position_embeddings": 64, "embd_pdrop": 0.0,
                    "resid_pdrop": 0.0, "attention_bias": false}),
        ],
        vec![
            json!({"model_type": "qwen2", "use_sliding_window": false, "sliding_window": 5, "max_window_layers": 2,
                    "tie_word_embeddings": true}),
        ],
        vec![
            experts.clone(),
            json!({"model_type": "qwen2_moe", "shared_expert_intermediate_size": 48, "sliding_window": 32,
                                     "max_window_layers": 2}),
        ],
        vec![
            experts,
            json!({"model_type": "qwen3_moe", "head_dim": 8, "sliding_window": null, "max_window_layers": 2,
                             "attention_bias": false}),
        ],
        vec![json!({"model_type": "olmo2", "attention_bias": false, "torch_dtype": "float32"})],
        vec![
            json!({"model_type": "olmo3", "attention_bias": false, "layer_types": [local, full], "sliding_window": 6,
                    "rope_scaling": yarn}),
        ],
        vec![json!({"model_type": "gpt_oss", "head_dim": 8, "attention_bias": true, "num_local_experts": 6,
                    "num_experts_per_tok": 3, "experts_per_token": 3, "layer_types": [local, full], "sliding_window": 6,
                    "rope_scaling": yarn, "swiglu_limit": 7.0, "initial_context_length": 16,
                    "output_router_logits": false, "router_aux_loss_coef": 0.9})],
        vec![
            later.clone(),
            json!({"model_type": "deepseek", "norm_topk_prob": false, "scoring_func": "softmax",
                                   "aux_loss_alpha": 0.001, "seq_aux": true, "pretraining_tp": 1}),
        ],
        vec![
            later.clone(),
            json!({"model_type": "dots1", "head_dim": 6, "n_group": 4, "topk_group": 2, "norm_topk_prob": true,
                                   "routed_scaling_factor": 2.5, "scoring_func": "noaux_tc", "topk_method": "noaux_tc",
                                   "sliding_window": null, "max_window_layers": 2}),
        ],
        vec![
            later.clone(),
            latent.clone(),
            json!({"model_type": "deepseek_v2", "q_lora_rank": null, "topk_method": "greedy",
             "scoring_func": "softmax", "norm_topk_prob": false, "routed_scaling_factor": 1.0, "n_group": 1,
             "topk_group": 1, "aux_loss_alpha": 0.001, "seq_aux": true,
             "rope_scaling": {"type": "yarn", "factor": 4, "beta_fast": 8, "beta_slow": 1, "mscale": 0.707,
                              "mscale_all_dim": 0.707, "original_max_position_embeddings": 16}}),
        ],
        vec![
            later,
            latent,
            json!({"model_type": "deepseek_v3", "q_lora_rank": 10, "topk_method": "noaux_tc",
             "scoring_func": "sigmoid", "norm_topk_prob": true, "routed_scaling_factor": 2.5, "n_group": 4,
             "topk_group": 2, "num_nextn_predict_layers": 0}),
        ],
        vec![
            json!({"model_type": "bamba", "num_attention_heads": 6, "num_hidden_layers": 3, "attn_layer_indices": [1],
                    "mamba_n_heads": 6, "mamba_n_groups": 2, "mamba_d_state": 5, "mamba_d_head": 8, "mamba_d_conv": 4,
                    "mamba_expand": 2, "mamba_chunk_size": 16, "mamba_conv_bias": true, "mamba_proj_bias": false,
                    "mlp_bias": false, "attention_bias": false, "num_logits_to_keep": 1, "partial_rotary_factor": 0.5,
                    "z_loss_coefficient": 0.0}),
        ],
        vec![
            json!({"model_type": "falcon_h1", "num_hidden_layers": 2, "head_dim": 8, "mamba_d_ssm": 36, "mamba_n_heads": 6, "mamba_d_head": 6,
                    "mamba_n_groups": 2, "mamba_d_state": 5, "mamba_d_conv": 3, "mamba_expand": 2, "mamba_chunk_size": 16,
                    "mamba_conv_bias": true, "mamba_proj_bias": false, "mamba_rms_norm": false, "mamba_norm_before_gate": false,
                    "attention_bias": false, "mlp_bias": false, "projectors_bias": false, "num_logits_to_keep": 1,
                    "embedding_multiplier": 5.65, "lm_head_multiplier": 0.0390625, "mlp_multipliers": [0.88, 0.58],
                    "key_multiplier": 0.39, "attention_in_multiplier": 1.0, "attention_out_multiplier": 0.9375,
                    "ssm_multipliers": [0.35, 0.25, 0.35, 0.5, 0.35], "ssm_in_multiplier": 1.25, "ssm_out_multiplier": 0.235}),
        ],
        vec![
            hybrid.clone(),
            json!({"model_type": "granitemoehybrid", "intermediate_size": 16, "shared_intermediate_size": 32,
                    "layer_types": ["mamba", "attention"], "num_local_experts": 6, "num_experts_per_tok": 3,
                    "mamba_n_heads": 6, "mamba_n_groups": 1, "mamba_d_state": 5, "mamba_d_head": 8, "mamba_d_conv": 4,
                    "mamba_expand": 2, "mamba_chunk_size": 16, "mamba_conv_bias": true, "mamba_proj_bias": false,
                    "embedding_multiplier": 12, "attention_multiplier": 0.3, "residual_multiplier": 0.22,
                    "logits_scaling": 6, "position_embedding_type": "nope", "normalization_function": "rmsnorm",
                    "init_method": "mup", "output_router_logits": false, "router_aux_loss_coef": 0.01}),
        ],
        vec![
            hybrid.clone(),
            json!({"model_type": "qwen3_next", "head_dim": 8, "num_hidden_layers": 4, "full_attention_interval": 2,
                    "moe_intermediate_size": 16, "num_experts": 6, "num_experts_per_tok": 3, "norm_topk_prob": true,
                    "decoder_sparse_step": 1, "mlp_only_layers": [], "shared_expert_intermediate_size": 32,
                    "output_router_logits": false, "router_aux_loss_coef": 0.001, "linear_conv_kernel_dim": 3,
                    "linear_key_head_dim": 5, "linear_value_head_dim": 4, "linear_num_key_heads": 2,
                    "linear_num_value_heads": 6, "partial_rotary_factor": 0.25}),
        ],
        vec![
            hybrid.clone(),
            json!({"model_type": "nemotron_h", "head_dim": 8, "num_hidden_layers": 5, "hybrid_override_pattern": "M-M*E",
                    "mamba_num_heads": 6, "mamba_head_dim": 4, "n_groups": 2, "ssm_state_size": 5, "conv_kernel": 3,
                    "chunk_size": 16, "expand": 2, "layer_norm_epsilon": 1e-5, "mlp_hidden_act": "relu2",
                    "mlp_bias": false, "use_bias": false, "use_conv_bias": true, "mamba_proj_bias": false,
                    "n_routed_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 16, "n_shared_experts": 1,
                    "moe_shared_expert_intermediate_size": 32, "n_group": 1, "topk_group": 1, "norm_topk_prob": true,
                    "routed_scaling_factor": 2.5, "mamba_hidden_act": "silu", "time_step_limit": null,
                    "rescale_prenorm_residual": true, "residual_in_fp32": false, "num_logits_to_keep": 1}),
        ],
        vec![
            hybrid,
            json!({"model_type": "kimi_linear", "num_key_value_heads": 4, "num_hidden_layers": 4, "first_k_dense_replace": 1,
                    "kv_lora_rank": 12, "q_lora_rank": null, "qk_rope_head_dim": 4, "qk_nope_head_dim": 6, "v_head_dim": 8,
                    "mla_use_nope": true, "model_max_length": 64, "moe_intermediate_size": 16, "moe_layer_freq": 1,
                    "moe_renormalize": true, "moe_router_activation_func": "sigmoid", "num_expert_group": 1,
                    "num_experts": 8, "num_experts_per_token": 3, "num_nextn_predict_layers": 0, "num_shared_experts": 1,
                    "routed_scaling_factor": 2.446, "topk_group": 1, "use_grouped_topk": true,
                    "linear_attn_config": {"full_attn_layers": [3], "kda_layers": [1, 2, 4], "head_dim": 6, "num_heads": 3,
                                           "short_conv_kernel_size": 3}}),
        ],
        vec![json!({"model_type": "ouro", "head_dim": 6, "num_key_value_heads": 4, "total_ut_steps": 3,
                    "early_exit_threshold": 1.0, "sliding_window": null, "use_sliding_window": false,
                    "max_window_layers": 2})],
    ];
    let merged = |parts: Vec<Value>| {
        let fields = [vec![common()], parts].concat();
        fields.iter().flat_map(|part| part.as_object().unwrap().clone()).collect::<Map<_, _>>().into()
    };
    families.into_iter().map(merged).collect()
}

/// A folder of the model that a configuration is, with weights that were drawn.
fn folder_of(config: &Value, at: &Path) {
    fs::create_dir_all(at).unwrap();
    let path = at.join("config.json");
    let read =
        Config::read(&path, config.as_object().unwrap().clone(), &[]).unwrap_or_else(|e| panic!("{e}"));
    let (dtype, stored) =
        if config["torch_dtype"] == "bfloat16" { ("bf16", Dtype::BF16) } else { ("f32", Dtype::F32) };
    let spec = read.spec("model", Some(stored)).unwrap();
    let model = drawn(&spec, 1, 1, None);
    let weights: Vec<Expected> =
        model.entries().iter().map(|(name, shape)| real(name, shape, &model.get(name).unwrap())).collect();
    let text = dreamc_dsl::show(&spec, Spelling::Yaml);
    // The file next to the weights says which of the families that have this model it is.
    fs::write(&path, config.to_string()).unwrap();
    write(&at.join("alone.safetensors"), &[("format", "dreamc"), ("spec", &text)], &weights);
    let said = good(at, &["export", "hf", "alone.safetensors", "-o", "theirs", "--dtype", dtype]);
    assert!(!said.contains("no class of transformers"), "{config}: {said}");
}

/// A model that was imported, trained and exported is still of its class: the worst fault of a wave
/// was between these steps, though each was tested.
#[test]
fn tuned_imports_leave_as_they_came() {
    for case in CASES {
        let place = tempfile::tempdir().unwrap();
        tuned_leave_as_they_came(&folder(case), place.path());
    }
}

/// The same of families whose authors' programs are not needed to make one.
#[test]
fn every_family_leaves_tuned_as_it_came() {
    let mut kinds = BTreeSet::new();
    for case in CASES {
        let text = fs::read_to_string(folder(case).join("config.json")).unwrap();
        let config: Value = serde_json::from_str(&text).unwrap();
        kinds.insert(config["model_type"].as_str().unwrap().to_string());
    }
    for config in small() {
        let kind = config["model_type"].as_str().unwrap();
        let place = tempfile::tempdir().unwrap();
        let from = place.path().join(kind);
        folder_of(&config, &from);
        tuned_leave_as_they_came(&from.join("theirs"), place.path());
        kinds.insert(kind.to_string());
    }
    // Its class needs a table that is no weight: it leaves as a package.
    kinds.insert("huginn_raven".into());
    let all: BTreeSet<String> = FAMILIES.iter().map(|family| family.kind.to_string()).collect();
    assert_eq!(kinds, all);
}
