//! Files of llama.cpp: `dreamc import gguf` and `dreamc export gguf`, against the package `gguf`
//! and transformers, and against llama.cpp itself, where they are installed.

use crate::export::python;
use crate::import::{dreamc, folder, good, logits_of, spec_of};
use crate::support::{error, read, root};
use dreamc_compiler::format::Packed;
use dreamc_data::Tokenizer;
use dreamc_hf::gguf::file::{self, Gguf, Kind};
use dreamc_hf::gguf::import::import;
use dreamc_hf::gguf::value::Value;
use dreamc_hf::hugging_face;
use dreamc_runtime::checkpoint::Weights;
use std::fs;
use std::path::Path;
use std::process::Command;

/// Numbers of a model's tensors, by name.
fn numbers(folder: &Path) -> Vec<(String, Vec<u32>)> {
    let weights = Weights::open(folder, None).unwrap();
    let names: Vec<String> = weights.entries().map(|(name, _)| name.to_string()).collect();
    let bits = |name: &String| weights.get(name).unwrap().unwrap().1.iter().map(|x| x.to_bits()).collect();
    names.iter().map(|name| (name.clone(), bits(name))).collect()
}

fn logits(folder: &Path, ids: &[i32]) -> Vec<f64> {
    let spec = spec_of(&Weights::open(folder, None).unwrap());
    logits_of(folder, &spec, ids, ids.len())
}

/// Logits of llama.cpp for ids; nothing where it is not installed.
fn llama(at: &Path, file: &str, ids: &[i32]) -> Option<Vec<f64>> {
    let python = dreamc_skip::llama()?;
    fs::write(at.join("ids.json"), format!("{ids:?}")).unwrap();
    let mut command = Command::new(python);
    command.arg(root("tests/hf/ggufs.py")).args(["llama", file, "ids.json", "logits.bin"]).current_dir(at);
    let output = command.output().unwrap();
    assert!(output.status.success(), "{file}: {}", String::from_utf8_lossy(&output.stderr));
    let bytes = fs::read(at.join("logits.bin")).unwrap();
    let number = |b: &[u8; 4]| f64::from(f32::from_le_bytes(*b));
    Some(bytes.as_chunks::<4>().0.iter().map(number).collect())
}

/// Files that the package `gguf` writes give the logits of transformers, for every family; so do
/// those that leave from there, and they come back as they were.
#[test]
fn models_of_llama_cpp_come_and_go() {
    let place = tempfile::tempdir().unwrap();
    let at = place.path();
    let Some(said) = python("ggufs.py", &["make", at.to_str().unwrap()]) else { return };
    for name in said.lines().last().unwrap().split(' ') {
        let (model, back) = (at.join(format!("{name}-in")), at.join(format!("{name}-back")));
        let expected = read(at.join(name).join("expected.safetensors").to_str().unwrap());
        let ids = expected["ids"].ints();
        good(at, &["import", "gguf", &format!("{name}.gguf"), "-o", &format!("{name}-in")]);
        let found = logits(&model, ids);
        let e = error(&found, expected["logits"].floats());
        assert!(e < 2e-5, "{name}: logits differ by {e}");

        // From the folder of transformers: the same tensors as the package has.
        let native = format!("{name}-native");
        hugging_face(&at.join(name), &at.join(&native), name, false, &[]).unwrap();
        let formats = if name == "llama_wide" {
            vec!["f32", "f16", "bf16", "q8_0", "q4_0", "mxfp4", "q4_k", "q6_k"]
        } else {
            vec!["f32", "q8_0"]
        };
        for form in formats {
            let file = format!("{name}-{form}.gguf");
            good(at, &["export", "gguf", &native, "-o", &file, "--format", form]);
            let (path, from) = (at.join(&file), at.join(name));
            let line = ["read", path.to_str().unwrap(), from.to_str().unwrap(), form];
            assert_eq!(python("ggufs.py", &line).unwrap().trim(), "equal", "{file}");
            fs::remove_dir_all(&back).ok();
            import(&path, &back, name, false).unwrap_or_else(|e| panic!("{file}: {e}"));
            if form == "f32" && !name.starts_with("gemma") {
                assert_eq!(numbers(&back), numbers(&at.join(&native)), "{name}");
            }
            if form == "f32" {
                let e = error(&logits(&back, ids), &found);
                assert!(e < 1e-6, "{name}: logits that come back differ by {e}");
            } else {
                // Blocks that leave again keep their bits.
                let again = at.join("again.gguf");
                good(at, &["export", "gguf", &format!("{name}-back"), "-o", "again.gguf"]);
                let other = differing(&again, &path);
                assert!(other.is_empty() || name.starts_with("gemma"), "{name} {form}: {other:?} differ");
                fs::remove_file(again).unwrap();
            }
        }
    }
}

/// Blocks of nvfp4 leave with the scales of their tensors, which the package `gguf` multiplies to
/// the numbers of the model, and come back as they were; so do scales of single experts.
#[test]
fn scales_of_tensors_come_and_go() {
    let place = tempfile::tempdir().unwrap();
    let at = place.path();
    let Some(_) = python("ggufs.py", &["make", at.to_str().unwrap()]) else { return };
    for (name, count) in [("llama_wide", 15), ("mixtral", 13), ("qwen3", 13)] {
        hugging_face(&at.join(name), &at.join("model"), name, false, &[]).unwrap();
        good(at, &["quantize", "model", "--format", "nvfp4", "-o", "few"]);
        good(at, &["export", "gguf", "few", "-o", "few.gguf"]);
        good(at, &["export", "gguf", "few", "-o", "wide.gguf", "--format", "f32"]);
        let (few, wide) = (at.join("few.gguf"), at.join("wide.gguf"));
        let line = ["same", few.to_str().unwrap(), wide.to_str().unwrap()];
        let said = python("ggufs.py", &line).unwrap();
        assert_eq!(said.trim(), format!("equal: {count} tensors of nvfp4"), "{name}");

        // Blocks made on the way out are those made before; matrices come back as they were.
        good(at, &["export", "gguf", "model", "-o", "packed.gguf", "--format", "nvfp4"]);
        // The embedding, which leaves as f32, was rounded to blocks in one of them.
        let other = differing(&at.join("packed.gguf"), &few);
        assert_eq!(other, ["token_embd.weight"], "{name}");
        import(&few, &at.join("back"), name, false).unwrap();
        assert_eq!(numbers(&at.join("back")), numbers(&at.join("few")), "{name}");
        good(at, &["export", "gguf", "back", "-o", "again.gguf"]);
        assert!(differing(&at.join("again.gguf"), &few).is_empty(), "{name}");

        // Other scales are other numbers: those of the experts of `mixtral`, one by one.
        let (moved, factors) = rescaled(&few);
        fs::write(at.join("moved.gguf"), moved).unwrap();
        let notes = import(&at.join("moved.gguf"), &at.join("moved"), name, false).unwrap().notes;
        assert!(notes.iter().any(|note| note.starts_with("1 scales of activations")), "{notes:?}");
        let up = if name == "mixtral" { "layers.0.ea.up.weight" } else { "layers.0.mlp.up.weight" };
        let [before, after] = ["few", "moved"].map(|folder| {
            let all = numbers(&at.join(folder));
            let found = all.into_iter().find(|(name, _)| name == up);
            found.unwrap_or_else(|| panic!("{name} has no {up}")).1
        });
        for (i, (x, y)) in before.iter().zip(&after).enumerate() {
            let factor = factors[i * factors.len() / before.len()];
            assert_eq!((f32::from_bits(*x) * factor).to_bits(), *y, "{name}, number {i}");
        }
        for file in ["few.gguf", "wide.gguf", "packed.gguf", "again.gguf", "moved.gguf"] {
            fs::remove_file(at.join(file)).unwrap();
        }
        for folder in ["model", "few", "back", "moved"] {
            fs::remove_dir_all(at.join(folder)).unwrap();
        }
    }
    // A scale that is NaN, two in the place of one, and one of a tensor without blocks.
    hugging_face(&at.join("qwen3"), &at.join("model"), "qwen3", false, &[]).unwrap();
    good(at, &["export", "gguf", "model", "-o", "few.gguf", "--format", "nvfp4"]);
    let few = at.join("few.gguf");
    let refused = |edit: &dyn Fn(&mut Whole)| {
        fs::write(at.join("bad.gguf"), edited(&few, "blk.1.attn_q.scale", edit)).unwrap();
        let said = import(&at.join("bad.gguf"), &at.join("none"), "m", false).err().unwrap().to_string();
        assert!(!at.join("none").exists());
        said
    };
    let said = refused(&|(.., bytes)| bytes.copy_from_slice(&f32::NAN.to_le_bytes()));
    assert!(said.contains("tensor blk.1.attn_q.scale: number 0 is NaN, which is no scale"), "{said}");
    let said = refused(&|(_, (_, shape), bytes)| (*shape, *bytes) = (vec![2], vec![0; 8]));
    assert!(said.contains("is f32 [2]; the scales of blk.1.attn_q.weight are f32 [1]"), "{said}");
    let said = refused(&|(name, ..)| *name = "blk.1.attn_norm.scale".into());
    assert!(said.contains("has a tensor blk.1.attn_norm.scale that such a model does not have"), "{said}");
    fs::remove_file(few).unwrap();
    fs::remove_dir_all(at.join("model")).unwrap();
    // A family where llama.cpp leaves scales out.
    hugging_face(&at.join("olmo2"), &at.join("model"), "olmo2", false, &[]).unwrap();
    let out = dreamc(at, &["export", "gguf", "model", "-o", "few.gguf", "--format", "nvfp4"]);
    let said = String::from_utf8_lossy(&out.stderr);
    assert!(!out.status.success() && said.contains("does not multiply by scales"), "{said}");
    assert!(!at.join("few.gguf").exists());
}

/// A tensor's name, kind and shape, and its bytes.
type Whole = (String, (Kind, Vec<u64>), Vec<u8>);

/// The tensors of a file.
fn tensors(path: &Path) -> Vec<Whole> {
    let file = Gguf::open(path).unwrap();
    let bytes = |name: &String| file.tensors.stored(name).unwrap().bytes().unwrap();
    file.kinds.iter().map(|(name, kind)| (name.clone(), kind.clone(), bytes(name))).collect()
}

/// The names of tensors that two files do not have alike.
fn differing(a: &Path, b: &Path) -> Vec<String> {
    let (a, b) = (tensors(a), tensors(b));
    let alone = |x: &[Whole], y: &[Whole]| {
        x.iter().filter(|own| !y.contains(own)).map(|own| own.0.clone()).collect::<Vec<_>>()
    };
    let mut names = [alone(&a, &b), alone(&b, &a)].concat();
    names.sort();
    names.dedup();
    names
}

/// A file with one of its tensors edited.
fn edited(path: &Path, name: &str, edit: &dyn Fn(&mut Whole)) -> Vec<u8> {
    let mut all = tensors(path);
    edit(all.iter_mut().find(|(own, ..)| own == name).unwrap());
    written(path, &all)
}

/// A file with the keys of another and these tensors.
fn written(path: &Path, all: &[Whole]) -> Vec<u8> {
    let values: Vec<(String, Value)> = Gguf::open(path).unwrap().values.into_iter().collect();
    let entries: Vec<file::Entry> =
        all.iter().map(|(name, (kind, shape), _)| (name.clone(), shape.clone(), *kind)).collect();
    let mut written = vec![];
    file::write(&mut written, &values, &entries, |i, out| out.write_all(&all[i].2)).unwrap();
    written
}

/// A file with other scales of its first matrix of `up`, by powers of two that are returned, and
/// with a scale of what it multiplies.
fn rescaled(path: &Path) -> (Vec<u8>, Vec<f32>) {
    let mut all = tensors(path);
    let of = |name: &str| name.starts_with("blk.0.ffn_up") && name.ends_with(".scale");
    let at = all.iter().position(|(name, ..)| of(name)).unwrap();
    let (name, kind, bytes) = &mut all[at];
    let scales = bytes.as_chunks_mut::<4>().0;
    let factors: Vec<f32> = (0..scales.len()).map(|i| 2f32.powi(i as i32 + 1)).collect();
    for (scale, factor) in scales.iter_mut().zip(&factors) {
        *scale = (f32::from_le_bytes(*scale) * factor).to_le_bytes();
    }
    let inputs = (name.replace(".scale", ".input_scale"), kind.clone(), bytes.clone());
    all.push(inputs);
    (written(path, &all), factors)
}

/// llama.cpp's logits for what leaves: those of the model where numbers are f32; where they are
/// packed, as far away as llama.cpp's own are from those for the same numbers in f32.
#[test]
fn llama_cpp_computes_what_leaves() {
    let place = tempfile::tempdir().unwrap();
    let at = place.path();
    if dreamc_skip::llama().is_none() {
        return;
    }
    let Some(said) = python("ggufs.py", &["make", at.to_str().unwrap()]) else { return };
    for name in said.lines().last().unwrap().split(' ') {
        let expected = read(at.join(name).join("expected.safetensors").to_str().unwrap());
        let ids = expected["ids"].ints();
        hugging_face(&at.join(name), &at.join("model"), name, false, &[]).unwrap();
        good(at, &["export", "gguf", "model", "-o", "wide.gguf", "--format", "f32"]);
        let e = error(&llama(at, "wide.gguf", ids).unwrap(), expected["logits"].floats());
        println!("{name} f32: {e:.1e}");
        // GELU is a table of binary16 there.
        let bound = if name.starts_with("gemma") { 2e-3 } else { 1e-5 };
        assert!(e < bound, "{name}: logits of llama.cpp differ by {e}");
        for form in ["q8_0", "q4_0", "q4_k"] {
            if form == "q4_k" && name != "llama_wide" {
                continue;
            }
            good(at, &["quantize", "model", "--format", form, "-o", "few"]);
            good(at, &["export", "gguf", "few", "-o", "few.gguf"]);
            good(at, &["export", "gguf", "few", "-o", "same.gguf", "--format", "f32"]);
            let own = logits(&at.join("few"), ids);
            let (few, same) = (llama(at, "few.gguf", ids).unwrap(), llama(at, "same.gguf", ids).unwrap());
            let (exact, noise, e) = (error(&own, &same), error(&few, &same), error(&own, &few));
            println!("{name} {form}: {exact:.1e} in f32, its own noise {noise:.1e}, ours from its {e:.1e}");
            assert!(exact < bound && e <= 1.5 * noise + 1e-4, "{name} {form}: {exact} {noise} {e}");
            for file in ["few.gguf", "same.gguf"] {
                fs::remove_file(at.join(file)).unwrap();
            }
            fs::remove_dir_all(at.join("few")).unwrap();
        }
        fs::remove_file(at.join("wide.gguf")).unwrap();
        fs::remove_dir_all(at.join("model")).unwrap();
    }
}

/// A tokenizer leaves with its model and comes back: whole, and made of its tokens where another
/// program wrote the file.
#[test]
fn tokenizers_come_and_go() {
    let place = tempfile::tempdir().unwrap();
    let at = place.path();
    for case in ["gemma2_new", "qwen3_old", "llama3_old"] {
        let (model, file, back) = (at.join("model"), at.join("m.gguf"), at.join("back"));
        hugging_face(&folder(case), &model, case, false, &[]).unwrap();
        let exported = dreamc(at, &["export", "gguf", "model", "-o", "m.gguf", "--format", "f16"]);
        let refused = String::from_utf8_lossy(&exported.stderr).into_owned();
        if exported.status.success() {
            import(&file, &back, case, false).unwrap();
            let text = |folder: &Path| fs::read_to_string(folder.join("tokenizer.json")).unwrap();
            assert_eq!(text(&back), text(&folder(case)), "{case}");
            // Without the whole text it is made of tokens and merges.
            let mut whole = Gguf::open(&file).unwrap();
            whole.values.remove("tokenizer.huggingface.json").unwrap();
            let values: Vec<(String, Value)> = whole.values.clone().into_iter().collect();
            let entries: Vec<file::Entry> =
                whole.kinds.iter().map(|(n, (kind, shape))| (n.clone(), shape.clone(), *kind)).collect();
            let mut bytes = vec![];
            file::write(&mut bytes, &values, &entries, |i, out| {
                out.write_all(&whole.tensors.stored(&entries[i].0).unwrap().bytes()?)
            })
            .unwrap();
            fs::write(&file, bytes).unwrap();
            fs::remove_dir_all(&back).unwrap();
            import(&file, &back, case, false).unwrap();
            let (ours, theirs) =
                [&back, &model].map(|f| Tokenizer::from_file(&f.join("tokenizer.json")).unwrap()).into();
            for line in ["the cat sat on the mat", "naïve 12345\n\n  x", "", "  two", "a\tb 🦀"] {
                assert_eq!(ours.encode(line).unwrap(), theirs.encode(line).unwrap(), "{case}: {line:?}");
                let ids = ours.encode(line).unwrap();
                assert_eq!(ours.decode(&ids), theirs.decode(&ids), "{case}: {line:?}");
            }
            assert_eq!((ours.end(), ours.begins()), (theirs.end(), theirs.begins()), "{case}");
            fs::remove_file(&file).unwrap();
            fs::remove_dir_all(&back).unwrap();
        } else {
            assert!(refused.contains("llama.cpp's"), "{case}: {refused}");
            assert!(!file.exists());
        }
        fs::remove_dir_all(&model).unwrap();
    }
}

/// A small file, its metadata and tensors changed.
fn small(change: impl FnOnce(&mut Vec<(String, Value)>, &mut Vec<file::Entry>)) -> Vec<u8> {
    let text = |x: &str| Value::Text(x.into());
    let mut values: Vec<(String, Value)> = [
        ("general.architecture", text("qwen3")),
        ("qwen3.embedding_length", Value::whole(32)),
        ("qwen3.context_length", Value::whole(16)),
        ("qwen3.block_count", Value::whole(1)),
        ("qwen3.attention.head_count", Value::whole(2)),
        ("qwen3.attention.head_count_kv", Value::whole(1)),
        ("qwen3.attention.key_length", Value::whole(16)),
        ("qwen3.feed_forward_length", Value::whole(32)),
        ("qwen3.attention.layer_norm_rms_epsilon", Value::F32(1e-5)),
        ("tokenizer.ggml.model", text("none")),
    ]
    .map(|(key, value)| (key.to_string(), value))
    .into();
    let (wide, blocks) = (Kind::named("f32").unwrap(), Kind::named("q8_0").unwrap());
    let mut entries: Vec<file::Entry> = [
        ("token_embd.weight", vec![40, 32], blocks),
        ("output_norm.weight", vec![32], wide),
        ("blk.0.attn_norm.weight", vec![32], wide),
        ("blk.0.attn_q.weight", vec![32, 32], blocks),
        ("blk.0.attn_k.weight", vec![16, 32], blocks),
        ("blk.0.attn_v.weight", vec![16, 32], blocks),
        ("blk.0.attn_output.weight", vec![32, 32], blocks),
        ("blk.0.attn_q_norm.weight", vec![16], wide),
        ("blk.0.attn_k_norm.weight", vec![16], wide),
        ("blk.0.ffn_norm.weight", vec![32], wide),
        ("blk.0.ffn_gate.weight", vec![32, 32], blocks),
        ("blk.0.ffn_up.weight", vec![32, 32], blocks),
        ("blk.0.ffn_down.weight", vec![32, 32], wide),
    ]
    .map(|(name, shape, kind)| (name.to_string(), shape, kind))
    .into();
    change(&mut values, &mut entries);
    let mut bytes = vec![];
    file::write(&mut bytes, &values, &entries, |i, out| {
        out.write_all(&vec![0; file::size(&entries[i])? as usize])
    })
    .unwrap();
    bytes
}

/// Why a file is refused; nothing may be left of the attempt.
fn refusal(bytes: &[u8]) -> String {
    let place = tempfile::tempdir().unwrap();
    let file = place.path().join("m.gguf");
    fs::write(&file, bytes).unwrap();
    let error = import(&file, &place.path().join("model"), "m", false).unwrap_err().to_string();
    assert_eq!(fs::read_dir(place.path()).unwrap().count(), 1, "{error}");
    error
}

#[test]
fn what_a_file_says_wrong_is_named() {
    let place = tempfile::tempdir().unwrap();
    let good = small(|_, _| {});
    fs::write(place.path().join("m.gguf"), &good).unwrap();
    import(&place.path().join("m.gguf"), &place.path().join("model"), "m", false).unwrap();

    type Change = fn(&mut Vec<(String, Value)>, &mut Vec<file::Entry>);
    let cases: [(Change, &str); 13] = [
        (|v, _| v[0].1 = Value::Text("gpt2".into()), "`general.architecture` is `gpt2`; llama, qwen2"),
        (|v, _| drop(v.remove(0)), "has no `general.architecture`"),
        (|v, _| drop(v.remove(1)), "lacks the key `qwen3.embedding_length`"),
        (
            |v, _| v[1].1 = Value::Text("x".into()),
            "the key `qwen3.embedding_length` is Text(\"x\"), no number",
        ),
        (
            |v, _| v[1].1 = Value::whole(64),
            "tensor token_embd.weight is [40, 32]; by its keys it should be [40, 64]",
        ),
        (|v, _| v[3].1 = Value::whole(1 << 40), "num_hidden_layers"),
        (|v, _| v.push(v[0].clone()), "the key general.architecture is there twice"),
        (|_, e| e.push(e[1].clone()), "tensor output_norm.weight is listed twice"),
        (|_, e| drop(e.remove(1)), "lacks the tensor output_norm.weight [32]"),
        (|_, e| e[1].0 = "blk.0.odd.weight".into(), "lacks the tensor output_norm.weight"),
        (|_, e| e.push(("odd".into(), vec![4], e[1].2)), "has a tensor odd that such a model does not have"),
        (
            |v, _| v.push(("qwen3.rope.scaling.type".into(), Value::Text("longrope".into()))),
            "`rope.scaling.type` is `longrope`; linear and yarn are read",
        ),
        (
            |v, _| v.push(("general.alignment".into(), Value::whole(24))),
            "general.alignment is Whole(24, 4), no power of two",
        ),
    ];
    for (change, right) in cases {
        let said = refusal(&small(change));
        assert!(said.contains(right), "{said}\nwithout {right}");
    }
    // Bytes that the writer would not write.
    let with = |at: usize, bytes: &[u8]| {
        let mut file = good.clone();
        file[at..at + bytes.len()].copy_from_slice(bytes);
        refusal(&file)
    };
    assert!(with(0, b"GGML").contains("begins with \"GGML\", not with GGUF"));
    assert!(with(4, &1u32.to_le_bytes()).contains("its version is 1; 2 and 3 are read"));
    assert!(with(4, &3u32.to_be_bytes()).contains("its numbers are big-endian"));
    assert!(with(8, &u64::MAX.to_le_bytes()).contains("18446744073709551615 tensors"));
    assert!(
        with(24, &u64::MAX.to_le_bytes()).contains("a key at byte 32 would have 18446744073709551615 bytes")
    );
    let place_of = |name: &str| {
        let at = good.windows(name.len()).position(|w| w == name.as_bytes()).unwrap();
        at + name.len()
    };
    // Dimensions, two sizes, type, offset.
    let list = place_of("token_embd.weight");
    assert!(with(list, &9u32.to_le_bytes()).contains("tensor token_embd.weight at byte"));
    assert!(with(list + 4, &33u64.to_le_bytes()).contains("rows of 33 numbers, which are no whole blocks"));
    assert!(with(list + 12, &(1u64 << 62).to_le_bytes()).contains("does not lie in the file"));
    assert!(with(list + 20, &10u32.to_le_bytes()).contains("is q2_k; f32, f16"));
    assert!(with(list + 20, &99u32.to_le_bytes()).contains("of a type 99 that is not known"));
    assert!(with(list + 24, &8u64.to_le_bytes()).contains("does not lie in the file"));
    assert!(with(list + 24, &(u64::MAX - 31).to_le_bytes()).contains("does not lie in the file"));
    assert!(with(list + 24, &32u64.to_le_bytes()).contains("share bytes"));
    // A scale that is NaN: the first block of the first tensor.
    let data = good.len() - {
        let place = tempfile::tempdir().unwrap();
        let path = place.path().join("m.gguf");
        fs::write(&path, &good).unwrap();
        let file = Gguf::open(&path).unwrap();
        let all = file
            .kinds
            .iter()
            .map(|(n, (k, s))| file::size(&(n.clone(), s.clone(), *k)).unwrap().next_multiple_of(32));
        all.sum::<u64>() as usize
    };
    let said = with(data + 34 * 3, &0x7e00u16.to_le_bytes());
    assert!(said.contains("tensor token_embd.weight: the scale of block 3 is not a finite number"), "{said}");
    for length in (0..good.len()).step_by(97) {
        refusal(&good[..length]);
    }
}

/// Models that llama.cpp does not have, or computes otherwise, do not leave.
#[test]
fn what_llama_cpp_does_not_compute_is_refused() {
    let place = tempfile::tempdir().unwrap();
    let at = place.path();
    let cases = [
        ("mixtral_old", "attention has a window of"),
        ("qwen3_new", "attention has a window of"),
        ("olmoe_new", "the router's `normalise` is another"),
    ];
    for (case, right) in cases {
        hugging_face(&folder(case), &at.join(case), case, false, &[]).unwrap();
        let output = dreamc(at, &["export", "gguf", case, "-o", "m.gguf"]);
        let said = String::from_utf8_lossy(&output.stderr);
        assert!(!output.status.success() && said.contains(right), "{case}: {said}");
        assert!(!at.join("m.gguf").exists());
    }
    hugging_face(&folder("llama3_new"), &at.join("model"), "m", false, &[]).unwrap();
    let bad = |line: &[&str]| {
        let output = dreamc(at, &[&["export", "gguf", "model", "-o", "m.gguf"], line].concat());
        assert!(!output.status.success() && !at.join("m.gguf").exists());
        String::from_utf8_lossy(&output.stderr).into_owned()
    };
    assert!(bad(&["--format", "q5"]).contains("there is no format `q5`; f32, f16, bf16"));
    good(at, &["export", "gguf", "model", "-o", "m.gguf"]);
    let before = fs::read(at.join("m.gguf")).unwrap();
    let again = dreamc(at, &["export", "gguf", "model", "-o", "m.gguf"]);
    assert!(String::from_utf8_lossy(&again.stderr).contains("m.gguf exists already"), "{again:?}");
    assert_eq!(before, fs::read(at.join("m.gguf")).unwrap());
}

/// Numbers of super-blocks as the package `gguf` has them, some and the sum of all.
#[test]
fn super_blocks_are_those_of_the_package() {
    type Case = (Packed, &'static [(usize, f32)], [f32; 8], f64);
    const D: f32 = 0.03125;
    const E: f32 = 0.0703125;
    let cases: [Case; 2] = [
        (
            Packed::Q4K,
            &[(0, D), (2, E)],
            [7.0703125, -3.5859375, 2.2265625, -1.0625, 1.109375, 12.5625, 3.3984375, -0.3984375],
            1239.25,
        ),
        (
            Packed::Q6K,
            &[(208, D)],
            [-44.71875, 53.0, -3.0, 7.21875, 78.84375, -10.96875, 34.03125, -1.875],
            144.125,
        ),
    ];
    for (format, scales, some, sum) in cases {
        let mut block: Vec<u8> = (0..format.bytes()).map(|i| ((i * 37 + 11) % 256) as u8).collect();
        for (at, scale) in scales {
            block[*at..at + 2].copy_from_slice(&half::f16::from_f32(*scale).to_le_bytes());
        }
        let mut found = vec![0.0; 256];
        format.unpack(&block, &mut found);
        assert_eq!([0, 1, 31, 32, 100, 128, 200, 255].map(|i| found[i]), some, "{format:?}");
        assert_eq!(found.iter().map(|x| f64::from(*x)).sum::<f64>(), sum, "{format:?}");
    }
}
