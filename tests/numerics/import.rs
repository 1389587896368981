//! Imported models against `transformers`: the folders of `tests/import`, each with the logits of
//! the program that wrote it.

use crate::support::{cpu, error, read, root};
use dreamc_compiler::{Options, compile};
use dreamc_data::Batch;
use dreamc_dsl::{Spec, Spelling};
use dreamc_hf::hugging_face;
use dreamc_runtime::checkpoint::{Weights, open_model, safetensors::Tensors};
use dreamc_runtime::model::Model;
use dreamc_runtime::train::prepare;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

/// The folders, by what is peculiar about them.
pub const CASES: [&str; 10] = [
    "gemma2_old",  // bf16, local layers by number, tied without saying so
    "gemma2_new",  // shards, `layer_types`, `rope_parameters`, an embedding scale that is not whole
    "llama3_old",  // shards, `rope_scaling` of Llama 3
    "llama3_new",  // tied, the same scaling in `rope_parameters`
    "qwen3_old",   // heads normalised one by one, head size of its own, tied
    "qwen3_new",   // windows from a layer on
    "mixtral_old", // windows everywhere
    "mixtral_new", // bf16
    "olmoe_old",   // gates not normalised
    "olmoe_new",   // gates normalised, fewer key heads
];

pub fn folder(case: &str) -> PathBuf {
    root(&format!("tests/import/{case}"))
}

pub fn spec_of(tensors: &Weights) -> Spec {
    let ast = dreamc_dsl::parse("spec", tensors.metadata("spec").unwrap(), Spelling::Yaml).unwrap();
    dreamc_dsl::check(&ast, &[]).unwrap().0
}

/// The logits of a model's folder for rows of `n` tokens.
pub fn logits_of(folder: &Path, spec: &Spec, ids: &[i32], n: usize) -> Vec<f64> {
    let tensors = Weights::open(folder, None).unwrap();
    let rows = ids.len() / n;
    let options = Options { logits: true, ..prepare::forward(rows as u64, n as u64) };
    let device = cpu(1);
    let mut model = Model::load(&device, compile(spec, &options).unwrap()).unwrap();
    model.restore(&tensors).unwrap();
    let mut batch = Batch::new(n);
    batch.ids = ids.to_vec();
    batch.targets = vec![0; rows * n];
    batch.positions = (0..rows).flat_map(|_| 0..n as i32).collect();
    batch.segments = vec![0; rows * n];
    model.evaluate(&batch).unwrap();
    model.all_logits().unwrap().into_iter().map(f64::from).collect()
}

#[test]
fn imported_models_give_the_logits_of_transformers() {
    for case in CASES {
        let out = tempfile::tempdir().unwrap();
        let out = out.path().join("model");
        let imported = hugging_face(&folder(case), &out, case, false, &[]).unwrap();
        let tensors = Weights::open(&out, None).unwrap();
        let spec = spec_of(&tensors);
        assert_eq!(spec, imported.spec, "{case}");
        assert_eq!(dreamc_dsl::load(out.join("spec.yaml"), &[]).unwrap().0, spec, "{case}");

        let expected = read(&format!("tests/import/{case}/expected.safetensors"));
        let (ids, logits) = (&expected["ids"], expected["logits"].floats());
        let found = logits_of(&out, &spec, ids.ints(), ids.dims[1]);
        let e = error(&found, logits);
        assert!(e < 1e-5, "{case}: logits differ by {e}");
        let worst = found.iter().zip(logits).map(|(a, b)| (a - b).abs()).fold(0.0, f64::max);
        assert!(worst < 1e-4, "{case}: a logit differs by {worst}");
    }
}

#[test]
fn weights_are_kept_as_they_are_stored() {
    let out = tempfile::tempdir().unwrap();
    let out = out.path().join("model");
    let imported = hugging_face(&folder("gemma2_old"), &out, "m", false, &[]).unwrap();
    assert_eq!(imported.bytes, 2 * imported.parameters);
    let (ours, theirs) = (
        open_model(&out).unwrap().0,
        Tensors::open(&folder("gemma2_old").join("model.safetensors")).unwrap(),
    );
    let stored =
        |name: &str| theirs.stored(&format!("model.layers.3.{name}.weight")).unwrap().bytes().unwrap();
    let qkv = [stored("self_attn.q_proj"), stored("self_attn.k_proj"), stored("self_attn.v_proj")].concat();
    assert_eq!(ours.stored("layers.3.global.qkv.weight").unwrap().bytes().unwrap(), qkv);
    assert_eq!(
        ours.stored("layers.3.mlp.norm.weight").unwrap().bytes().unwrap(),
        stored("pre_feedforward_layernorm")
    );
}

/// A copy of a folder, with its `config.json` changed.
fn changed(
    case: &str,
    change: impl FnOnce(&mut serde_json::Map<String, serde_json::Value>),
) -> tempfile::TempDir {
    let copy = tempfile::tempdir().unwrap();
    for entry in fs::read_dir(folder(case)).unwrap().flatten() {
        fs::copy(entry.path(), copy.path().join(entry.file_name())).unwrap();
    }
    let path = copy.path().join("config.json");
    let mut map = serde_json::from_str(&fs::read_to_string(&path).unwrap()).unwrap();
    change(&mut map);
    fs::write(&path, serde_json::to_string(&map).unwrap()).unwrap();
    copy
}

#[test]
fn begin_tokens_that_files_differ_on_are_noted() {
    let notes = |says: bool| {
        let from = changed("gemma2_new", |_| {});
        let config = format!("{{\"add_bos_token\": {says}}}");
        fs::write(from.path().join("tokenizer_config.json"), config).unwrap();
        let place = tempfile::tempdir().unwrap();
        hugging_face(from.path(), &place.path().join("model"), "m", false, &[]).unwrap().notes
    };
    let differ = |notes: Vec<String>| notes.iter().any(|note| note.contains("tokenizer.json counts"));
    assert!(differ(notes(false)) != differ(notes(true)));
}

/// Why a folder is refused; nothing may be left of the attempt.
fn refusal(from: &Path) -> String {
    let place = tempfile::tempdir().unwrap();
    let error = hugging_face(from, &place.path().join("model"), "m", false, &[]).unwrap_err().to_string();
    assert_eq!(fs::read_dir(place.path()).unwrap().count(), 0);
    error
}

/// Weights in another format are refused with what makes tensors of them; a pickle is never loaded.
#[test]
fn weights_of_other_formats_are_refused_with_the_way_to_convert_them() {
    let cases = [
        ("pytorch_model.bin", "is no archive of torch.save"),
        ("pytorch_model.bin.index.json", "is not a JSON object"),
        ("consolidated.00.pth", "save_pretrained"),
        ("model-Q4_K_M.gguf", "model-Q4_K_M.gguf` reads it"),
        ("flax_model.msgpack", "import the PyTorch weights"),
        ("notes.txt", "its weights are missing"),
    ];
    for (file, words) in cases {
        let (from, out) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
        for name in ["config.json", "tokenizer.json"] {
            let _ = std::fs::copy(folder("llama3_old").join(name), from.path().join(name));
        }
        std::fs::write(from.path().join(file), "anything").unwrap();
        let error =
            hugging_face(from.path(), &out.path().join("m"), "m", false, &[]).unwrap_err().to_string();
        assert!(error.contains(words), "{file}: {error}");
        assert!(!out.path().join("m").exists());
    }
}

/// Files of `torch.save`, one or several with an index, give the model that safetensors give; one
/// that runs something, or is cut, gives nothing.
#[test]
fn pickles_of_tensors_are_read_as_data() {
    let place = tempfile::tempdir().unwrap();
    let at = |name: &str| place.path().join(name);
    for (case, kind) in [("llama3_new", "one"), ("gemma2_new", "shards"), ("mixtral_new", "one")] {
        let (from, old) = (folder(case), at(case));
        let line = [kind, old.to_str().unwrap(), from.to_str().unwrap()];
        if super::export::python("pickled.py", &line).is_none() {
            return;
        }
        let [ours, expected] = [(&old, "ours"), (&from, "expected")].map(|(from, name)| {
            let to = at(&format!("{case}-{name}"));
            hugging_face(from, &to, "m", false, &[]).unwrap();
            super::export::tensors(&to)
        });
        assert_eq!(ours, expected, "{case}");
    }
    let from = at("mixtral_new");
    let file = from.join("pytorch_model.bin");
    let good = fs::read(&file).unwrap();
    for cut in [0, 10, good.len() / 2, good.len() - 1] {
        fs::write(&file, &good[..cut]).unwrap();
        refusal(&from);
    }
    let line = ["evil", from.to_str().unwrap(), from.to_str().unwrap()];
    super::export::python("pickled.py", &line).unwrap();
    let error = refusal(&from);
    assert!(error.contains("which makes no tensor") && error.contains("nothing of it was run"), "{error}");
    assert!(!from.join("ran").exists());
}

#[test]
fn what_is_not_known_is_refused_by_its_name() {
    let cases: [(&str, &str, serde_json::Value, &str); 24] = [
        (
            "llama3_old",
            "model_type",
            "gpt2".into(),
            "`model_type` is \"gpt2\"; dreamc imports gemma2, gemma3_text, llama",
        ),
        ("llama3_old", "model_type", "deepseek_v32".into(), "its attention chooses keys by an index"),
        ("llama3_old", "model_type", "olmo2".into(), "expected [\"Olmo2ForCausalLM\"]"),
        ("llama3_old", "use_mrope", true.into(), "the field `use_mrope` (true) is not known"),
        (
            "llama3_old",
            "architectures",
            serde_json::json!(["LlamaForSequenceClassification"]),
            "LlamaForCausalLM",
        ),
        (
            "llama3_old",
            "attention_bias",
            true.into(),
            "lacks the tensor model.layers.0.self_attn.q_proj.bias",
        ),
        (
            "llama3_old",
            "hidden_act",
            "relu".into(),
            "`hidden_act` is \"relu\"; expected silu or gelu_pytorch_tanh or gelu_new or gelu",
        ),
        (
            "llama3_old",
            "partial_rotary_factor",
            0.5.into(),
            "the field `partial_rotary_factor` (0.5) is not known",
        ),
        ("llama3_old", "quantization_config", serde_json::json!({}), "`quantization_config`"),
        ("llama3_old", "sliding_window", 4.into(), "`sliding_window` is 4"),
        (
            "llama3_old",
            "rope_scaling",
            serde_json::json!({"rope_type": "longrope", "factor": 2}),
            "is \"longrope\"; dreamc has",
        ),
        ("llama3_old", "rope_scaling", serde_json::json!({"type": "yarn"}), "lacks `rope_scaling.factor`"),
        (
            "llama3_old",
            "rope_scaling",
            serde_json::json!({"type": "linear", "factor": 2, "mscale": 1}),
            "the field `rope_scaling.mscale` (1) is not known",
        ),
        ("llama3_new", "rope_scaling", serde_json::json!({"rope_type": "default"}), "they differ"),
        ("llama3_new", "rope_theta", 7.into(), "`rope_theta` is 7 and `rope_parameters.rope_theta` is 500"),
        ("llama3_old", "hidden_size", 25.into(), "25"),
        ("llama3_old", "hidden_size", "24".into(), "`hidden_size` is \"24\"; expected a whole number"),
        ("llama3_old", "intermediate_size", 41.into(), "by config.json it should be [41, 24]"),
        ("llama3_old", "num_hidden_layers", 4.into(), "lacks the tensor model.layers.3."),
        ("llama3_old", "num_hidden_layers", 2.into(), "has a tensor model.layers.2."),
        ("llama3_old", "tie_word_embeddings", true.into(), "has a tensor lm_head.weight"),
        ("gemma2_new", "layer_types", vec!["chunked_attention"; 4].into(), "\"chunked_attention\""),
        ("gemma2_new", "sliding_window", serde_json::Value::Null, "there is no `sliding_window`"),
        ("olmoe_old", "clip_qkv", 8.0.into(), "`clip_qkv` is 8.0"),
    ];
    for (case, field, value, expected) in cases {
        let from = changed(case, |map| {
            map.insert(field.into(), value.clone());
        });
        let error = refusal(from.path());
        assert!(error.contains(expected), "{case}, {field} = {value}: {error}");
    }
    for field in ["model_type", "vocab_size", "intermediate_size"] {
        let from = changed("llama3_old", |map| {
            map.shift_remove(field);
        });
        let error = refusal(from.path());
        assert!(error.contains(&format!("lacks `{field}`")), "{error}");
    }
    let from = changed("llama3_old", |_| {});
    fs::remove_file(from.path().join("model-00002-of-00005.safetensors")).unwrap();
    assert!(refusal(from.path()).contains("model-00002-of-00005.safetensors"));
    fs::remove_file(from.path().join("model.safetensors.index.json")).unwrap();
    assert!(refusal(from.path()).contains("has neither model.safetensors nor model.safetensors.index.json"));
    fs::write(from.path().join("config.json"), "[]").unwrap();
    assert!(refusal(from.path()).contains("config.json: is not a JSON object"));
}

#[test]
fn defaults_of_a_class_may_be_absent() {
    let out = tempfile::tempdir().unwrap();
    let from = changed("gemma2_old", |map| {
        map.shift_remove("attn_logit_softcapping");
        map.insert("final_logit_softcapping".into(), serde_json::Value::Null);
        map.shift_remove("rope_theta");
    });
    let spec = hugging_face(from.path(), &out.path().join("m"), "m", false, &[]).unwrap().spec;
    let text = dreamc_dsl::show(&spec, Spelling::Yaml);
    assert!(text.contains("softcap: 50") && !text.contains("logit_softcap: 30"), "{text}");
    assert!(spec.model.tie && spec.model.norm.unit_offset);
}

pub fn dreamc(folder: &Path, line: &[&str]) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_dreamc"));
    command.args(line).current_dir(folder).env("DREAMC_CACHE", folder.join("cache"));
    command.output().unwrap()
}

pub fn good(folder: &Path, line: &[&str]) -> String {
    let output = dreamc(folder, line);
    assert!(output.status.success(), "{line:?}: {}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8(output.stdout).unwrap()
}

#[test]
fn every_command_takes_an_imported_model() {
    let place = tempfile::tempdir().unwrap();
    let at = place.path();
    let from = folder("gemma2_new");
    let line = ["import", "hf", from.to_str().unwrap()];
    let said = good(at, &line);
    assert!(said.contains("gemma2_new: 27,480 parameters") && said.contains("imports/gemma2_new"), "{said}");

    // Nothing is replaced without being asked, and nothing of others ever.
    let again = dreamc(at, &line);
    assert!(String::from_utf8_lossy(&again.stderr).contains("replace it with --force"));
    good(at, &[&line[..], &["--force"]].concat());
    fs::write(at.join("imports/gemma2_new/notes.txt"), "mine").unwrap();
    let foreign = dreamc(at, &[&line[..], &["--force"]].concat());
    assert!(String::from_utf8_lossy(&foreign.stderr).contains("it is left alone"));
    fs::remove_file(at.join("imports/gemma2_new/notes.txt")).unwrap();

    let model = "imports/gemma2_new";
    let written = good(at, &["generate", model, "the an", "-n", "5", "--json"]);
    assert!(written.contains("\"tokens\":"), "{written}");
    assert_eq!(written, good(at, &["generate", model, "the an", "-n", "5", "--json", "--no-cache"]));
    fs::write(at.join("text.txt"), "the cat and the hat in the rain, and then again\n".repeat(4)).unwrap();
    let figures = good(at, &["eval", model, "--data", "text.txt", "--sequence", "16", "--stride", "4"]);
    assert!(
        figures.contains("texts and rows begin with the begin token; rows of 16 tokens, stride 4"),
        "{figures}"
    );
    let line = ["eval", model, "--data", "text.txt", "--sequence", "16", "--stride", "4", "--json"];
    let figures: serde_json::Value = serde_json::from_str(&good(at, &line)).unwrap();
    let expected = read("tests/import/gemma2_new/expected.safetensors");
    let (nats, targets) = (expected["text_nats"].floats()[0], expected["text_targets"].ints()[0]);
    assert_eq!(figures[0]["loss"]["targets"], targets);
    let found = figures[0]["loss"]["nats"].as_f64().unwrap();
    assert!((found - nats).abs() < 1e-5 * nats, "{found} nats, transformers finds {nats}");
    assert!(good(at, &["count", model]).contains("27,480"));
    fs::write(at.join("ids.json"), "[[1, 2, 3, 4]]").unwrap();
    good(at, &["probe", model, "--ids", "ids.json", "-o", "probe.safetensors"]);
    let mut bytes = fs::read(at.join(model).join("model.safetensors")).unwrap();
    let last = bytes.len() - 1;
    bytes[last] ^= 1;
    fs::write(at.join(model).join("model.safetensors"), bytes).unwrap();
    let damaged = dreamc(at, &["generate", model, "a"]);
    assert!(String::from_utf8_lossy(&damaged.stderr).contains("BLAKE3 differs"));
}
