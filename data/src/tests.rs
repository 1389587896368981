//! Files to batches, whole.

use super::*;
use dreamc_dsl::spec::{self, BadRows, Source, Task, TaskKind};
use std::collections::HashSet;
use std::fs;
use tempfile::TempDir;

struct House {
    folder: TempDir,
}

impl House {
    fn new(files: &[(&str, &[u8])]) -> Self {
        let folder = tempfile::tempdir().unwrap();
        for (name, content) in files {
            fs::write(folder.path().join(name), content).unwrap();
        }
        House { folder }
    }

    fn open(&self, data: &spec::Data, sequence: u64) -> Result<Dataset, DataError> {
        let cache = self.folder.path().join("cache");
        let settings =
            Settings { base: self.folder.path(), cache: &cache, sequence, vocab: 256, seed: 5, stride: None };
        Dataset::open(data, &settings, &mut |_| {})
    }
}

fn data(sources: Vec<Source>) -> spec::Data {
    spec::Data {
        sources: sources.into_iter().map(|s| (s, 1.0)).collect(),
        tokenizer: spec::Tokenizer::Bytes,
        validation: 0.1,
        validation_file: None,
        document_mask: false,
        begin: None,
        bad_rows: BadRows::Stop,
    }
}

fn text(path: &str) -> Source {
    Source::Text { path: path.into() }
}

fn jsonl(path: &str) -> Source {
    Source::Jsonl {
        path: path.into(),
        prompt: Some("q".into()),
        answer: "a".into(),
        rejected: None,
        template: "{prompt}={answer}".into(),
    }
}

fn take(batches: &mut Batches, n: usize) -> Vec<Batch> {
    (0..n).map(|_| batches.take(3).unwrap().unwrap()).collect()
}

#[test]
fn an_epoch_of_text_visits_every_token_once_in_another_order() {
    let content: String = (0..200).map(|i| format!("{i:04}")).collect();
    let house = House::new(&[("t.txt", content.as_bytes())]);
    let mut d = data(vec![text("t.txt")]);
    d.validation = 0.25;
    let set = house.open(&d, 16).unwrap();
    let mut batches = set.train(Cursor::default()).unwrap();
    let mut orders: Vec<Vec<Batch>> = vec![];
    while orders.len() < 3 {
        let batch = batches.take(1).unwrap().unwrap();
        if (orders.len() as f64) < batches.epochs().unwrap().ceil() {
            orders.push(vec![]);
        }
        orders.last_mut().unwrap().push(batch);
    }
    for order in &orders[..2] {
        // 800 bytes and the end token; a quarter is held out; the first token is never a target.
        let seen: u64 = order.iter().map(Batch::learned).sum();
        assert!((seen as i64 - 600).abs() <= 1, "{seen}");
    }
    assert_ne!(orders[0], orders[1]);
    let mut held = set.validation().unwrap().unwrap();
    let mut n = 0;
    while let Some(batch) = held.take(4).unwrap() {
        assert_eq!(batch.rows(), 4);
        n += batch.learned();
    }
    assert!((n as i64 - 199).abs() <= 1, "{n}");
}

#[test]
fn batches_continue_from_any_cursor_with_the_same_bits() {
    let rows: String =
        (0..40).map(|i| format!("{{\"q\": \"{i}\", \"a\": \"{}\"}}\n", "x".repeat(i))).collect();
    let long = "some running text. ".repeat(50);
    let house = House::new(&[("a.jsonl", rows.as_bytes()), ("t.txt", long.as_bytes())]);
    let task = Task { size: 4, ..Task::new(TaskKind::Permutation, 1, 3) };
    let mut d = data(vec![jsonl("a.jsonl"), text("t.txt"), Source::Task(task)]);
    d.sources[1].1 = 2.0;
    let set = house.open(&d, 48).unwrap();
    let whole = take(&mut set.train(Cursor::default()).unwrap(), 40);
    let mut batches = set.train(Cursor::default()).unwrap();
    for (i, expected) in whole.iter().enumerate() {
        let text = serde_json::to_string(&batches.cursor()).unwrap();
        batches = set.train(serde_json::from_str(&text).unwrap()).unwrap();
        assert_eq!(batches.take(3).unwrap().as_ref(), Some(expected), "batch {i}");
    }
    assert_ne!(whole[0], whole[1]);
    let seeded = |seed| {
        let cache = house.folder.path().join("cache");
        let settings = Settings {
            base: house.folder.path(),
            cache: &cache,
            sequence: 48,
            vocab: 256,
            seed,
            stride: None,
        };
        let set = Dataset::open(&d, &settings, &mut |_| {}).unwrap();
        take(&mut set.train(Cursor::default()).unwrap(), 4)
    };
    assert_eq!(seeded(5), whole[..4]);
    assert_ne!(seeded(6), whole[..4]);
}

#[test]
fn a_stride_predicts_every_target_once_from_more_context() {
    let content: Vec<u8> = (0..100).map(|i| b'0' + i % 64).collect();
    let house = House::new(&[("t.txt", &content)]);
    let mut d = data(vec![text("t.txt")]);
    d.validation_file = Some("t.txt".into());
    let cache = house.folder.path().join("cache");
    let settings = Settings {
        base: house.folder.path(),
        cache: &cache,
        sequence: 16,
        vocab: 256,
        seed: 5,
        stride: Some(6),
    };
    let set = Dataset::open(&d, &settings, &mut |_| {}).unwrap();
    let mut held = set.validation().unwrap().unwrap();
    let mut targets = vec![];
    while let Some(batch) = held.take(1).unwrap() {
        let first = batch.targets.iter().position(|&t| t >= 0).unwrap();
        assert!(targets.len() < 16 || first == 10, "{first} after {}", targets.len());
        targets.extend(batch.targets.iter().copied().filter(|&t| t >= 0));
    }
    let expected: Vec<i32> = content[1..].iter().map(|&b| i32::from(b)).chain([0]).collect();
    assert_eq!(targets, expected);
}

/// A tokenizer of pieces without bytes to fall back on, whose tokens stand for other bytes each
/// time: rows of any stride count those of the text, and documents those of their answers.
#[test]
fn bytes_of_rows_are_those_of_the_text() {
    let special = |id: u64, content: &str| {
        serde_json::json!({"id": id, "content": content, "single_word": false, "lstrip": false, "rstrip": false,
            "normalized": false, "special": true})
    };
    let tokenizer = serde_json::json!({
        "version": "1.0", "truncation": null, "padding": null, "normalizer": {"type": "Lowercase"},
        "added_tokens": [special(0, "<unk>"), special(1, "</s>")], "post_processor": null, "decoder": null,
        "pre_tokenizer": {"type": "Metaspace", "replacement": "\u{2581}", "prepend_scheme": "always", "split": true},
        "model": {"type": "Unigram", "unk_id": 0, "byte_fallback": false,
            "vocab": [["<unk>", 0.0], ["</s>", 0.0], ["\u{2581}", -3.0], ["a", -2.0], ["\u{2581}ab", -1.0]]}
    });
    let content = "Ab aé  🦀\n".repeat(40);
    let rows = "{\"q\": \"ab é\", \"a\": \"Ab 🦀\"}\n".repeat(30);
    let json = tokenizer.to_string();
    let house = House::new(&[
        ("t.txt", content.as_bytes()),
        ("a.jsonl", rows.as_bytes()),
        ("t.json", json.as_bytes()),
    ]);
    let cache = house.folder.path().join("cache");
    for (source, stride, expected) in [
        (text("t.txt"), None, content.len()),
        (text("t.txt"), Some(5), content.len()),
        (jsonl("a.jsonl"), None, 30 * "Ab 🦀".len()),
    ] {
        let path = dataset::path(&source).unwrap();
        let mut d = data(vec![source]);
        d.tokenizer = spec::Tokenizer::File("t.json".into());
        d.validation_file = Some(path.display().to_string());
        d.begin = Some(true);
        let settings =
            Settings { base: house.folder.path(), cache: &cache, sequence: 16, vocab: 64, seed: 5, stride };
        // Built, and found again.
        for _ in 0..2 {
            let set = Dataset::open(&d, &settings, &mut |_| {}).unwrap();
            let mut held = set.validation().unwrap().unwrap();
            let mut bytes = 0;
            while let Some(batch) = held.take(3).unwrap() {
                assert_eq!(batch.bytes.len(), batch.targets.len());
                bytes += batch.bytes.iter().map(|&n| n as usize).sum::<usize>();
            }
            assert_eq!(bytes, expected, "{} {stride:?}", path.display());
        }
    }
}

#[test]
fn weights_are_proportions_of_rows() {
    let house = House::new(&[("a.txt", &[b'a'; 4000]), ("b.txt", &[b'b'; 4000])]);
    let mut d = data(vec![text("a.txt"), text("b.txt")]);
    d.sources[0].1 = 3.0;
    let set = house.open(&d, 8).unwrap();
    let batch = set.train(Cursor::default()).unwrap().take(400).unwrap().unwrap();
    let a = batch.ids.chunks(8).filter(|row| row[0] == i32::from(b'a')).count();
    assert_eq!(a, 300);
}

#[test]
fn examples_are_whole_and_loss_is_on_the_answer_and_the_end() {
    let rows = "{\"q\": \"ab\", \"a\": \"cd\"}\n".repeat(30);
    let house = House::new(&[("a.jsonl", rows.as_bytes())]);
    let mut d = data(vec![jsonl("a.jsonl")]);
    d.document_mask = true;
    let set = house.open(&d, 14).unwrap();
    assert!(set.begins());
    let batch = set.train(Cursor::default()).unwrap().take(1).unwrap().unwrap();
    let (e, a, b, c, d, eq) = (0, 97, 98, 99, 100, 61);
    assert_eq!(batch.ids, [e, a, b, eq, c, d, e, a, b, eq, c, d, e, e]);
    assert_eq!(batch.targets, [-1, -1, -1, c, d, e, -1, -1, -1, c, d, e, -1, -1]);
    assert_eq!(batch.positions, [0, 1, 2, 3, 4, 5, 0, 1, 2, 3, 4, 5, 0, 1]);
    assert_eq!(batch.segments, [0, 0, 0, 0, 0, 0, 1, 1, 1, 1, 1, 1, 2, 2]);
}

#[test]
fn training_and_validation_rows_are_disjoint() {
    let rows: String = (0..200).map(|i| format!("{{\"q\": \"{i:03}\", \"a\": \"y\"}}\n")).collect();
    let house = House::new(&[("a.jsonl", rows.as_bytes())]);
    let set = house.open(&data(vec![jsonl("a.jsonl")]), 8).unwrap();
    let prompts = |b: &Batch| -> Vec<Vec<i32>> { b.ids.chunks(8).map(|r| r[1..4].to_vec()).collect() };
    let mut held = set.validation().unwrap().unwrap();
    let mut validation = HashSet::new();
    while let Some(batch) = held.take(5).unwrap() {
        validation.extend(prompts(&batch));
    }
    assert_eq!(validation.len(), 20);
    let mut batches = set.train(Cursor::default()).unwrap();
    let epoch: HashSet<_> = (0..180).flat_map(|_| prompts(&batches.take(1).unwrap().unwrap())).collect();
    assert_eq!(epoch.len(), 180);
    assert!(epoch.is_disjoint(&validation));
}

#[test]
fn bad_rows_are_reported_or_counted() {
    let rows = b"{\"q\": \"1\", \"a\": \"2\"}\nnot json\n{\"q\": \"1\", \"a\": \"2\"}\n{}\n";
    let house = House::new(&[("a.jsonl", rows), ("b.txt", b"fine\n\xff\xfe\n"), ("empty.txt", b"")]);
    let mut d = data(vec![jsonl("a.jsonl")]);
    let error = house.open(&d, 8).err().unwrap().to_string();
    assert!(error.contains("a.jsonl:2: not a JSON object"), "{error}");
    d.bad_rows = BadRows::Skip;
    let set = house.open(&d, 8).unwrap();
    assert!(set.describe()[0].contains("2 documents"), "{:?}", set.describe());
    assert!(set.describe()[0].contains("2 bad rows left out (line 2: "), "{:?}", set.describe());
    let error = house.open(&data(vec![text("b.txt")]), 8).err().unwrap().to_string();
    assert!(error.contains("b.txt:2: byte 1 of the line is not UTF-8"), "{error}");
    let error = house.open(&data(vec![text("empty.txt")]), 8).err().unwrap().to_string();
    assert!(error.contains("holds no text"), "{error}");
    let error = house.open(&data(vec![text("none.txt")]), 8).err().unwrap().to_string();
    assert!(error.contains("none.txt"), "{error}");
}

#[test]
fn shards_are_cached_by_content_and_damage_is_repaired() {
    let house = House::new(&[("t.txt", &[b'x'; 5000])]);
    let d = data(vec![text("t.txt")]);
    let cache = house.folder.path().join("cache/shards");
    house.open(&d, 8).unwrap();
    house.open(&d, 8).unwrap();
    let shards = || fs::read_dir(&cache).unwrap().map(|e| e.unwrap().path()).collect::<Vec<_>>();
    assert_eq!(shards().len(), 1);
    let tokens = shards()[0].join("tokens.bin");
    fs::write(&tokens, b"short").unwrap();
    // Files that a killed builder left go, too.
    fs::create_dir(cache.join(".tmp-1-0-x")).unwrap();
    fs::write(cache.join(".tmp-1-0-x/lock"), b"").unwrap();
    house.open(&d, 8).unwrap();
    assert_eq!(fs::metadata(&tokens).unwrap().len(), 5001);
    assert_eq!(shards().len(), 1);
    fs::write(house.folder.path().join("t.txt"), [b'y'; 5000]).unwrap();
    let other = house.open(&d, 8).unwrap();
    assert_eq!(shards().len(), 2);
    assert_eq!(other.train(Cursor::default()).unwrap().take(1).unwrap().unwrap().ids[0], i32::from(b'y'));
}

#[test]
fn sequences_too_short_are_refused_with_one_long_enough() {
    let house = House::new(&[]);
    let task = Task::new(TaskKind::Arithmetic, 1, 8);
    let error = house.open(&data(vec![Source::Task(task)]), 32).err().unwrap().to_string();
    assert!(error.contains("use sequence 128"), "{error}");
    let rows = format!("{{\"q\": \"{}\", \"a\": \"2\"}}\n", "long ".repeat(10)).repeat(5);
    let house = House::new(&[("a.jsonl", rows.as_bytes())]);
    let set = house.open(&data(vec![jsonl("a.jsonl")]), 16).unwrap();
    let error = set.train(Cursor::default()).unwrap().take(1).unwrap_err().to_string();
    assert!(error.contains("use a longer sequence"), "{error}");
}

#[test]
fn a_mask_begins_a_document_at_every_end_token() {
    let rows = "{\"a\": \"ab\"}\n".repeat(20);
    let house = House::new(&[("a.jsonl", rows.as_bytes())]);
    let source = Source::Jsonl {
        path: "a.jsonl".into(),
        prompt: None,
        answer: "a".into(),
        rejected: None,
        template: "{answer}".into(),
    };
    let mut d = data(vec![source]);
    (d.document_mask, d.validation) = (true, 0.0);
    let set = house.open(&d, 9).unwrap();
    assert!(!set.begins() && set.validation().unwrap().is_none());
    let mut batches = set.train(Cursor::default()).unwrap();
    for _ in 0..10 {
        let batch = batches.take(1).unwrap().unwrap();
        for i in (1..9).filter(|&i| batch.targets[i] >= 0) {
            let begins = batch.ids[i] == 0;
            assert_eq!(batch.positions[i], if begins { 0 } else { batch.positions[i - 1] + 1 });
            assert_eq!(batch.segments[i], batch.segments[i - 1] + i32::from(begins));
        }
    }
}

#[test]
fn parquet_reads_as_jsonl_does() {
    use ::parquet::data_type::{ByteArray, ByteArrayType};
    use ::parquet::file::{properties::WriterProperties, writer::SerializedFileWriter};
    use ::parquet::schema::parser::parse_message_type;
    use std::sync::Arc;

    let house = House::new(&[("bad.parquet", b"PAR1 nothing PAR1")]);
    let schema = "message rows { required binary q (UTF8); required int32 n; optional binary a (UTF8); }";
    let schema = Arc::new(parse_message_type(schema).unwrap());
    let file = fs::File::create(house.folder.path().join("a.parquet")).unwrap();
    let mut writer =
        SerializedFileWriter::new(file, schema, Arc::new(WriterProperties::builder().build())).unwrap();
    let mut group = writer.next_row_group().unwrap();
    let strings = |values: &[&str]| values.iter().map(|v| ByteArray::from(*v)).collect::<Vec<_>>();
    let mut column = group.next_column().unwrap().unwrap();
    column.typed::<ByteArrayType>().write_batch(&strings(&["ab", "cd"]), None, None).unwrap();
    column.close().unwrap();
    let mut column = group.next_column().unwrap().unwrap();
    column.typed::<::parquet::data_type::Int32Type>().write_batch(&[1, 2], None, None).unwrap();
    column.close().unwrap();
    let mut column = group.next_column().unwrap().unwrap();
    column.typed::<ByteArrayType>().write_batch(&strings(&["yes"]), Some(&[1, 0]), None).unwrap();
    column.close().unwrap();
    group.close().unwrap();
    writer.close().unwrap();

    let source = |path: &str, answer: &str| Source::Parquet {
        path: path.into(),
        prompt: Some("q".into()),
        answer: answer.into(),
        rejected: None,
        template: "{prompt}={answer}".into(),
    };
    let mut d = data(vec![source("a.parquet", "a")]);
    let problem = |d: &spec::Data| house.open(d, 8).err().unwrap().to_string();
    assert!(problem(&d).contains("a.parquet:2: column \"a\" is null"));
    d.bad_rows = BadRows::Skip;
    let set = house.open(&d, 8).unwrap();
    let batch = set.train(Cursor::default()).unwrap().take(1).unwrap().unwrap();
    assert_eq!(set.tokenizer.decode(&batch.ids.iter().map(|&i| i as u32).collect::<Vec<_>>()), "ab=yes");
    assert!(problem(&data(vec![source("a.parquet", "b")])).contains("its columns are q, n, a"));
    assert!(problem(&data(vec![source("bad.parquet", "a")])).contains("not a Parquet file"));
}

#[test]
fn a_parquet_file_of_a_few_bytes_and_millions_of_rows_is_refused() {
    use ::parquet::data_type::{ByteArray, ByteArrayType};
    use ::parquet::file::{properties::WriterProperties, writer::SerializedFileWriter};
    use ::parquet::schema::parser::parse_message_type;
    use std::sync::Arc;

    let house = House::new(&[]);
    let schema = Arc::new(parse_message_type("message rows { optional binary a (UTF8); }").unwrap());
    let file = fs::File::create(house.folder.path().join("a.parquet")).unwrap();
    let mut writer =
        SerializedFileWriter::new(file, schema, Arc::new(WriterProperties::builder().build())).unwrap();
    let mut group = writer.next_row_group().unwrap();
    let mut column = group.next_column().unwrap().unwrap();
    // One value, a dictionary of one, and rows that have none.
    let levels: Vec<i16> = (0..1 << 20).map(|i| i16::from(i == 0)).collect();
    column.typed::<ByteArrayType>().write_batch(&[ByteArray::from("x")], Some(&levels), None).unwrap();
    column.close().unwrap();
    group.close().unwrap();
    writer.close().unwrap();
    let source = Source::Parquet {
        path: "a.parquet".into(),
        prompt: None,
        answer: "a".into(),
        rejected: None,
        template: "{answer}".into(),
    };
    let mut d = data(vec![source]);
    d.bad_rows = BadRows::Skip;
    let error = house.open(&d, 8).err().unwrap().to_string();
    assert!(error.contains("has 1048576 rows in ") && error.contains("at most 4 a byte are read"), "{error}");
}

#[test]
fn pairs_are_two_rows_each_and_held_out_together() {
    let row = |i: usize| format!("{{\"q\": \"{i}\", \"good\": \"yes{i}\", \"bad\": \"no\"}}\n");
    let rows: String = (0..10).map(row).collect();
    let house = House::new(&[("a.jsonl", rows.as_bytes())]);
    let source = Source::Jsonl {
        path: "a.jsonl".into(),
        prompt: Some("q".into()),
        answer: "good".into(),
        rejected: Some("bad".into()),
        template: "{prompt}={answer}".into(),
    };
    let mut d = data(vec![source]);
    d.validation = 0.2;
    let set = house.open(&d, 8).unwrap();
    assert_eq!(set.pair_documents(), (20, 20));
    let all = |held: bool| {
        let mut pairs = set.pairs(held).unwrap().unwrap();
        let mut found = vec![];
        while let Some(batch) = pairs.take(4).unwrap() {
            found.extend(batch.documents);
        }
        found
    };
    let (learned, held) = (all(false), all(true));
    assert_eq!((learned.len(), held.len()), (16, 4));
    let mut both = [learned.clone(), held].concat();
    both.sort_unstable();
    assert_eq!(both, (0..20).collect::<Vec<_>>());
    // Loss is on answers and their ends alone, and a cursor goes on in the middle of an epoch.
    let mut batches = set.train(Cursor::default()).unwrap();
    let first = batches.take(2).unwrap().unwrap();
    assert_eq!(first.documents[1], first.documents[0] + 1);
    assert!(learned.contains(&first.documents[0]));
    let text = |row: usize| {
        let ids: Vec<u32> =
            first.targets[8 * row..][..8].iter().filter(|t| **t >= 0).map(|t| *t as u32).collect();
        set.tokenizer.decode(&ids)
    };
    let number = first.documents[0] / 2;
    assert_eq!([text(0), text(1)], [format!("yes{number}"), "no".into()]);
    let mut again = set.train(batches.cursor()).unwrap();
    assert_eq!(again.take(30).unwrap(), batches.take(30).unwrap());
    // All else sees the better answers of pairs.
    let held = set.validation().unwrap().unwrap().take(2).unwrap().unwrap();
    assert!(held.documents.is_empty() && held.learned() > 0);
    // Pairs whose prompts fill a row are left out, and all of them are an error.
    let error = house.open(&d, 1).unwrap().train(Cursor::default()).unwrap().take(2).unwrap_err();
    assert!(error.to_string().contains("no prompt of the 8 pairs is shorter"), "{error}");
}
