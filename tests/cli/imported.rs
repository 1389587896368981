//! Imported models at the command line: trained further, ended where `transformers` ends, refused
//! where nothing reads their text.

use crate::support::root;
use crate::support::sandbox::{Sandbox, metrics, texts};
use serde_json::{Map, Value, json};
use std::fs;
use std::path::Path;

const TEXT: &str = "the cat and the hat in the rain, and then again\n";

/// A sandbox with the folder `model`: a copy of one that `transformers` wrote, its `config.json`
/// changed.
fn sandbox(case: &str, change: impl FnOnce(&mut Map<String, Value>)) -> Sandbox {
    let sandbox = Sandbox::with(&[("book.txt", &TEXT.repeat(40))]);
    fs::create_dir(sandbox.path("model")).unwrap();
    for entry in fs::read_dir(root(&format!("tests/import/{case}"))).unwrap().flatten() {
        fs::copy(entry.path(), sandbox.path("model").join(entry.file_name())).unwrap();
    }
    let mut map = serde_json::from_str(&sandbox.read("model/config.json")).unwrap();
    change(&mut map);
    sandbox.write("model/config.json", &serde_json::to_string(&map).unwrap());
    sandbox
}

fn set(map: &mut Map<String, Value>, field: &str, value: Value) {
    map.insert(field.into(), value);
}

/// The specification of the import.
fn imported(sandbox: &Sandbox) -> String {
    sandbox.good(&["import", "hf", "model", "-o", "imported"]);
    sandbox.read("imported/spec.yaml")
}

#[test]
fn training_from_an_import_begins_from_its_weights_and_reads_with_its_tokenizer() {
    let sandbox = sandbox("gemma2_new", |_| {});
    imported(&sandbox);
    let recipe = ["--set", "train.steps=2", "--set", "train.batch=2", "--set", "train.sequence=16"];
    let line = ["train", "imported", "--data", "book.txt", "--out", "run"];
    let said = sandbox.good(&[&line[..], &recipe].concat());
    assert!(said.contains("begins from the weights of ") && said.contains("/imported"), "{said}");
    let spec = sandbox.read("run/spec.yaml");
    assert!(spec.contains("weights: ") && spec.contains("imported/tokenizer.json"), "{spec}");
    // As with `base`, which always meant that.
    sandbox.write("tuned.yaml", "base: imported\ndata: {text: book.txt}\n");
    sandbox.good(&[&["train", "tuned.yaml", "--out", "based"], &recipe[..]].concat());
    assert_eq!(metrics(&sandbox.path("run"))[0]["loss"], metrics(&sandbox.path("based"))[0]["loss"]);
    let shown = sandbox.good(&[
        "data",
        "inspect",
        "imported",
        "--data",
        "book.txt",
        "--json",
        "--set",
        "train.sequence=16",
    ]);
    let rows: Value = serde_json::from_str(&shown).unwrap();
    assert_eq!(rows[0]["ids"][0], 257, "rows begin with the tokenizer's begin token");
}

#[test]
fn what_reads_no_text_is_refused() {
    let sandbox = sandbox("gemma2_new", |_| {});
    fs::remove_file(sandbox.path("model/tokenizer.json")).unwrap();
    let said = sandbox.good(&["import", "hf", "model", "-o", "imported"]);
    assert!(said.contains("no tokenizer.json") && !said.contains("dreamc generate"), "{said}");
    for line in [&["generate", "imported", "a"][..], &["eval", "imported", "--data", "book.txt"]] {
        let error = sandbox.error(line);
        assert!(
            error.contains("has no tokenizer.json next to it: text cannot be read or written"),
            "{error}"
        );
    }
    for line in [
        &["train", "imported", "--data", "book.txt", "--out", "run"][..],
        &["data", "inspect", "imported", "--data", "book.txt"],
    ] {
        let error = sandbox.error(line);
        assert!(error.contains("is an imported model without a tokenizer.json"), "{error}");
    }
    assert!(!sandbox.path("run").exists());
}

#[test]
fn texts_end_where_the_folder_says() {
    let sandbox = sandbox("gemma2_new", |_| {});
    imported(&sandbox);
    let line = ["generate", "imported", "the an", "-n", "12", "--json"];
    let free: Value = serde_json::from_str(&sandbox.good(&line)).unwrap();
    let ids: Vec<u64> = free["ids"].as_array().unwrap().iter().map(|id| id.as_u64().unwrap()).collect();
    assert_eq!(ids.len() as u64, free["tokens"].as_u64().unwrap());
    // The third of its tokens becomes one that ends texts: by a list where it is not the first.
    let third = ids[2];
    let before = ids.iter().position(|id| *id == third).unwrap();
    sandbox.write("model/generation_config.json", &json!({"eos_token_id": [256, third]}).to_string());
    let said = sandbox.good(&["import", "hf", "model", "-o", "imported", "--force"]);
    assert!(!said.contains("--stop"), "{said}");
    let ended: Value = serde_json::from_str(&sandbox.good(&line)).unwrap();
    assert_eq!((&ended["why"], &ended["tokens"]), (&"end".into(), &before.into()));
    // So does what is trained from it.
    let recipe = [
        "--set",
        "train.steps=1",
        "--set",
        "train.batch=2",
        "--set",
        "train.sequence=16",
        "--set",
        "train.learning_rate=1e-12",
    ];
    sandbox.good(&[&["train", "imported", "--data", "book.txt", "--out", "run"], &recipe[..]].concat());
    let ended: Value =
        serde_json::from_str(&sandbox.good(&["generate", "run", "the an", "-n", "12", "--json"])).unwrap();
    assert_eq!((&ended["why"], &ended["tokens"]), (&"end".into(), &before.into()));
}

#[test]
fn a_stop_text_that_is_a_special_token_stops() {
    let sandbox = sandbox("gemma2_new", |_| {});
    imported(&sandbox);
    let free: Value = serde_json::from_str(
        &sandbox.good(&["generate", "imported", "the an", "-n", "9", "--json", "--greedy"]),
    )
    .unwrap();
    let third = free["ids"][2].as_u64().unwrap();
    let before = free["ids"].as_array().unwrap().iter().position(|id| *id == third).unwrap();
    let mut tokenizer: Value = serde_json::from_str(&sandbox.read("model/tokenizer.json")).unwrap();
    let vocab = tokenizer["model"]["vocab"].as_object().unwrap();
    let name = vocab.iter().find(|(_, id)| **id == third).unwrap().0.clone();
    let special = json!({"id": third, "content": name, "single_word": false, "lstrip": false, "rstrip": false, "normalized": false, "special": true});
    tokenizer["added_tokens"].as_array_mut().unwrap().insert(0, special);
    sandbox.write("model/tokenizer.json", &tokenizer.to_string());
    sandbox.good(&["import", "hf", "model", "-o", "imported", "--force"]);
    let line = ["generate", "imported", "the an", "-n", "9", "--json", "--greedy", "--stop", &name];
    let stopped: Value = serde_json::from_str(&sandbox.good(&line)).unwrap();
    assert_eq!((&stopped["why"], &stopped["tokens"]), (&"stop".into(), &before.into()));
}

#[test]
fn a_prompt_longer_than_the_context_is_said() {
    let sandbox = sandbox("gemma2_new", |_| {});
    imported(&sandbox);
    let (_, err) = texts(&sandbox.run(&["generate", "imported", &"ab".repeat(50), "-n", "4"]));
    assert!(err.contains("has 101 tokens, the model's context is 64: its first 38 are left out"), "{err}");
    let (_, err) = texts(&sandbox.run(&["generate", "imported", "ab", "-n", "4"]));
    assert!(!err.contains("left out"), "{err}");
}

#[test]
fn the_files_of_the_original_are_kept() {
    let sandbox = sandbox("gemma2_new", |_| {});
    let files = [
        "config.json",
        "generation_config.json",
        "tokenizer_config.json",
        "special_tokens_map.json",
        "chat_template.jinja",
        "tokenizer.json",
    ];
    files[1..5].iter().for_each(|name| sandbox.write(&format!("model/{name}"), "{}\n"));
    imported(&sandbox);
    for name in files {
        assert_eq!(
            sandbox.read(&format!("imported/{name}")),
            sandbox.read(&format!("model/{name}")),
            "{name}"
        );
        assert!(sandbox.read("imported/checksums.txt").contains(&format!("  {name}\n")), "{name}");
    }
    // A specification that a person changed, or wrote, is not replaced.
    sandbox.write("imported/spec.yaml", &(sandbox.read("imported/spec.yaml") + "# mine\n"));
    let error = sandbox.error(&["import", "hf", "model", "-o", "imported", "--force"]);
    assert!(error.contains("spec.yaml is a specification of yours, or was changed"), "{error}");
    assert!(sandbox.read("imported/spec.yaml").contains("# mine"));
    fs::create_dir(sandbox.path("mine")).unwrap();
    sandbox.write("mine/spec.yaml", "model: {}\n");
    sandbox.error(&["import", "hf", "model", "-o", "mine", "--force"]);
    assert_eq!(sandbox.read("mine/spec.yaml"), "model: {}\n");
}

#[test]
fn harmless_fields_and_defaults_of_classes_are_taken() {
    let plain = imported(&sandbox("llama3_old", |_| {}));
    let found = imported(&sandbox("llama3_old", |map| {
        for field in [
            "is_llama_config",
            "unsloth_fixed",
            "attn_implementation",
            "tokenizer_class",
            "do_sample",
            "temperature",
        ] {
            set(map, field, true.into());
        }
        set(map, "transformers.js_config", json!({"dtype": "q4"}));
        for field in ["rope_interleaved", "use_sliding_window", "is_encoder_decoder"] {
            set(map, field, false.into());
        }
        set(map, "partial_rotary_factor", 1.0.into());
        map.shift_remove("hidden_act");
    }));
    assert_eq!(plain, found);
    let found = imported(&sandbox("llama3_old", |map| {
        map.shift_remove("rms_norm_eps");
        map.shift_remove("max_position_embeddings");
    }));
    assert!(found.contains("context: 2048") && found.contains("eps: 1e-6"), "{found}");
    let found = imported(&sandbox("gemma2_new", |map| {
        map.shift_remove("query_pre_attn_scalar");
    }));
    assert!(found.contains("scale: 0.0625"), "{found}");
}

#[test]
fn a_field_is_ignored_by_its_name_alone() {
    let sandbox = sandbox("llama3_old", |map| set(map, "mystery", 3.into()));
    let line = |more: &[&'static str]| [&["import", "hf", "model", "-o", "imported"], more].concat();
    let error = sandbox.error(&line(&[]));
    assert!(
        error.contains("the field `mystery` (3) is not known") && error.contains("add `--ignore mystery`"),
        "{error}"
    );
    let said = sandbox.good(&line(&["--ignore", "mystery"]));
    assert!(said.contains("the field `mystery` is ignored"), "{said}");
    let error = sandbox.error(&line(&["--force", "--ignore", "mystery", "--ignore", "hidden_size"]));
    assert!(error.contains("the field `hidden_size` is known and cannot be ignored"), "{error}");
    let error = sandbox.error(&line(&["--force", "--ignore", "mistery"]));
    assert!(error.contains("has no field `mistery` to ignore"), "{error}");
}

#[test]
fn auxiliary_losses_are_those_the_configuration_asks_for() {
    let off = imported(&sandbox("mixtral_old", |_| {}));
    assert!(off.contains("load_balance_loss: 0.0, z_loss: 0"), "{off}");
    let on = sandbox("mixtral_old", |map| set(map, "output_router_logits", true.into()));
    let said = on.good(&["import", "hf", "model", "-o", "imported"]);
    // 0.001, two of its experts at a time, two layers.
    assert!(on.read("imported/spec.yaml").contains("load_balance_loss: 0.001, z_loss: 0"));
    assert!(said.contains("note  output_router_logits: training balances experts"), "{said}");
    let off = imported(&sandbox("olmoe_old", |_| {}));
    assert!(off.contains("load_balance_loss: 0.0, z_loss: 0"), "{off}");
}

#[test]
fn windows_are_those_that_transformers_has() {
    // 28 and 4096 are the defaults of the class, so that none of four layers has a window.
    let none = imported(&sandbox("qwen3_new", |map| {
        map.shift_remove("max_window_layers");
        map.shift_remove("layer_types");
    }));
    assert!(!none.contains("window"), "{none}");
    let all = imported(&sandbox("qwen3_new", |map| {
        set(map, "max_window_layers", 0.into());
        map.shift_remove("sliding_window");
        map.shift_remove("layer_types");
    }));
    assert!(all.contains("window: 4096"), "{all}");
    // It is not read of Mixtral, whose layers all have the window.
    let types = json!(["full_attention", "full_attention"]);
    let mixtral = imported(&sandbox("mixtral_old", |map| set(map, "layer_types", types)));
    assert_eq!(mixtral, imported(&sandbox("mixtral_old", |_| {})));
}

#[test]
fn a_folder_that_is_no_model_says_why() {
    let sandbox = Sandbox::with(&[]);
    let error = |from: &str| sandbox.error(&["import", "hf", from, "-o", "imported"]);
    assert!(error("HuggingFaceTB/SmolLM2-135M").contains("hf download"));
    fs::create_dir(sandbox.path("empty")).unwrap();
    assert!(error("empty").contains("has no config.json"));
    sandbox.write("empty/adapter_config.json", "{}");
    assert!(error("empty").contains("is an adapter of another model (PEFT)"));
    let scaled =
        self::sandbox("llama3_old", |map| set(map, "rope_scaling", json!({"type": "dynamic", "factor": 2})));
    let error = scaled.error(&["import", "hf", "model", "-o", "imported"]);
    assert!(error.contains("`rope_scaling.rope_type` is \"dynamic\""), "{error}");
    assert!(!Path::new(&sandbox.path("imported")).exists());
}

#[test]
fn rows_beyond_the_end_are_not_shown() {
    let sandbox = sandbox("gemma2_new", |_| {});
    imported(&sandbox);
    let line = [
        "data",
        "inspect",
        "imported",
        "--data",
        "book.txt",
        "--validation",
        "--rows",
        "500",
        "--set",
        "train.sequence=16",
    ];
    let shown = sandbox.good(&line);
    assert!(shown.contains("\nrow 1:") && !shown.contains("loss on 0"), "{shown}");
}

#[test]
fn ends_that_are_no_tokens_and_noises_are_said() {
    for (id, shown) in [(json!(999_999), "999999"), (json!("x"), "\"x\""), (json!([1, -1]), "-1")] {
        let sandbox = sandbox("gemma2_new", |map| {
            set(map, "eos_token_id", id);
            set(map, "attention_dropout", json!(0.1));
        });
        let _ = fs::remove_file(sandbox.path("model/generation_config.json"));
        let said = sandbox.good(&["import", "hf", "model", "-o", "imported"]);
        let lost = format!("`eos_token_id` {shown} is no token of tokenizer.json; texts end with ");
        assert!(said.contains(&lost), "{said}");
        assert!(said.contains("attention_dropout: training has no such noise"), "{said}");
    }
    let sandbox = sandbox("gemma2_new", |_| {});
    let said = sandbox.good(&["import", "hf", "model", "-o", "imported"]);
    assert!(!said.contains("no token") && !said.contains("noise"), "{said}");
}
