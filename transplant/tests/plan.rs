//! Plans and numbers, by specifications alone: what is proposed, what is refused and how, and the
//! numbers that each way makes.

use dreamc_compiler::compiled::Init;
use dreamc_dsl::{Spec, Spelling, check, parse};
use dreamc_transplant::{At, Plan, Read, Same, Side, TransplantError, Vocabulary, plan, values};
use std::collections::BTreeMap;

fn spec(text: &str) -> Spec {
    check(&parse("spec", text, Spelling::Dream).unwrap(), &[]).unwrap_or_else(|e| panic!("{e}")).0
}

/// A model of these components and layers, with what comes before it.
fn model(before: &str, parts: &str) -> Spec {
    spec(&format!("{before}\nmodel m {{ vocab 13 hidden 4 context 8\n{parts} }}\n"))
}

const SA: &str = "sa = sequence { heads 4 kv_heads 4 head_size 2 projection none }";
const MLP: &str = "mlp = mlp { intermediate 6 }";

fn dense(layers: u64) -> Spec {
    model("", &format!("{SA}\n{MLP}\nrepeat {layers} {{ sa > mlp }}"))
}

fn planned(new: &Spec, old: &Spec) -> Result<Plan, TransplantError> {
    let how = new.transplant.clone().unwrap_or_default();
    plan(&Side::new(new).unwrap(), &Side::new(old).unwrap(), &how, &Vocabulary::Same)
}

/// The way of a tensor, and where it comes from.
fn way(plan: &Plan, name: &str) -> (String, Vec<String>) {
    let m = plan.moves.iter().find(|m| m.to == name).unwrap_or_else(|| panic!("no {name}"));
    (m.words(), m.from.iter().map(|source| source.name.clone()).collect())
}

fn whole(plan: &Plan) -> &Same {
    &plan.claims.iter().find(|claim| claim.part == "model").unwrap().same
}

/// Message, help and field of an error.
fn refusal(new: &Spec, old: &Spec) -> (String, String, String) {
    match planned(new, old).unwrap_err() {
        TransplantError::Refused { message, help, at: At::Field(field), .. } => (message, help, field),
        error => panic!("{error}"),
    }
}

/// A donor whose numbers count up, tensor by tensor, and a recipe of -1.
struct Counting(BTreeMap<String, (Vec<u64>, f32)>);

impl Counting {
    fn of(side: &Side) -> Self {
        let each = side.tensors.iter().enumerate();
        Counting(each.map(|(i, t)| (t.name.clone(), (t.shape.clone(), 1000.0 * i as f32))).collect())
    }

    fn numbers(&self, name: &str) -> Vec<f32> {
        let (shape, first) = &self.0[name];
        (0..shape.iter().product::<u64>()).map(|i| first + i as f32).collect()
    }
}

impl Read for Counting {
    fn donor(&self, name: &str) -> Result<(Vec<u64>, Vec<f32>), TransplantError> {
        Ok((self.0[name].0.clone(), self.numbers(name)))
    }

    fn drawn(&self, _: &str, _: Init, elements: usize) -> Vec<f32> {
        vec![-1.0; elements]
    }
}

/// The numbers of a tensor of a transplant, and the donor.
fn made(new: &Spec, old: &Spec, name: &str) -> (Vec<f32>, Counting) {
    let (side, plan) = (Side::new(new).unwrap(), planned(new, old).unwrap());
    let donor = Counting::of(&Side::new(old).unwrap());
    let i = plan.moves.iter().position(|m| m.to == name).unwrap();
    (values(&plan.moves[i], side.tensors[i].init, &donor).unwrap(), donor)
}

#[test]
fn a_model_of_the_same_architecture_is_copied() {
    let plan = planned(&dense(2), &dense(2)).unwrap();
    assert!(plan.moves.iter().all(|m| m.words() == "copy" && m.from[0].name == m.to), "{:?}", plan.moves);
    assert!(plan.left.is_empty() && *whole(&plan) == Same::Same);
}

#[test]
fn experts_come_of_a_network_by_their_role() {
    let old = dense(2);
    let experts = |keys: &str| {
        let ea = format!("ea = experts {{ count 3 active 2 intermediate 6 query 4 {keys} }}");
        model("", &format!("{SA}\n{ea}\nrepeat 2 {{ sa > ea }}"))
    };
    let new = experts("");
    let plan = planned(&new, &old).unwrap();
    assert_eq!(way(&plan, "layers.1.ea.up.weight"), ("tile 3".into(), vec!["layers.1.mlp.up.weight".into()]));
    assert_eq!(way(&plan, "layers.1.ea.router.keys.weight"), ("fresh".into(), vec![]));
    assert_eq!(*whole(&plan), Same::Same);
    let (numbers, donor) = made(&new, &old, "layers.0.ea.down.weight");
    assert_eq!(numbers, donor.numbers("layers.0.mlp.down.weight").repeat(3));
    // Gates that do not sum to one, and experts next to them, are another function.
    for (keys, reason) in [
        ("shared 1", "shared experts add something"),
        ("noop 1", "some experts return nothing"),
        ("router { normalise false }", "its gates do not sum to one"),
        ("router { scale 2 }", "its gates do not sum to one"),
    ] {
        let plan = planned(&experts(keys), &old).unwrap();
        assert!(
            matches!(whole(&plan), Same::Otherwise(why) if why.contains(reason)),
            "{keys}: {:?}",
            whole(&plan)
        );
    }
}

#[test]
fn heads_are_averaged_into_groups_and_repeated_out_of_them() {
    let few = SA.replace("kv_heads 4", "kv_heads 2");
    let few = model("", &format!("{few}\n{MLP}\nrepeat 2 {{ sa > mlp }}"));
    let name = "layers.0.sa.qkv.weight";
    // Rows are 8 of queries, then 8 of keys and 8 of values, two a head.
    let (numbers, donor) = made(&few, &dense(2), name);
    let all = donor.numbers(name);
    assert_eq!(numbers[..32], all[..32]);
    let mean = |first: usize| (0..8).map(|i| (all[first + i] + all[first + 8 + i]) / 2.0).collect::<Vec<_>>();
    assert_eq!(numbers[32..48], [mean(32), mean(48)].concat());
    assert_eq!(numbers[48..], [mean(64), mean(80)].concat());
    assert!(
        matches!(whole(&planned(&few, &dense(2)).unwrap()), Same::Otherwise(why) if why.contains("group 4 heads into 2"))
    );
    let (numbers, donor) = made(&dense(2), &few, name);
    let all = donor.numbers(name);
    let head = |i: usize| all[32 + 8 * i..][..8].to_vec();
    let expected = [all[..32].to_vec(), [0, 0, 1, 1, 2, 2, 3, 3].map(head).concat()].concat();
    assert_eq!(numbers, expected);
    assert_eq!(*whole(&planned(&dense(2), &few).unwrap()), Same::Same);
}

#[test]
fn depths_that_differ_are_asked_about() {
    let (message, help, field) = refusal(&dense(6), &dense(4));
    assert!(
        message.contains("applies 6 layers and the donor 4") && help.contains("`zero` adds layers"),
        "{message} {help}"
    );
    assert_eq!(field, "transplant.depth");
    let (_, help, _) = refusal(&dense(2), &dense(4));
    assert!(help.contains("`spread` leaves layers out"), "{help}");
    let taken = |ours: u64, depth: &str| {
        let before = format!("transplant {{ depth {depth} }}");
        let new = model(&before, &format!("{SA}\n{MLP}\nrepeat {ours} {{ sa > mlp }}"));
        let plan = planned(&new, &dense(4)).unwrap_or_else(|e| panic!("{depth}: {e}"));
        let one =
            |taken: &dreamc_transplant::Taken| taken.layers.iter().map(|(set, _)| *set).collect::<Vec<_>>();
        let silent = plan.depths.iter().map(|taken| taken.silent).collect::<Vec<_>>();
        (plan.depths.iter().map(one).collect::<Vec<_>>(), silent, whole(&plan).clone())
    };
    let layers = |list: &[usize]| list.iter().map(|layer| vec![*layer]).collect::<Vec<_>>();
    assert_eq!(taken(2, "spread").0, layers(&[0, 3]));
    assert_eq!(taken(6, "stack").0, layers(&[0, 1, 2, 1, 2, 3]));
    assert_eq!(taken(2, "average").0, [[0, 1], [2, 3]]);
    assert_eq!(taken(3, "interpolate").0, [vec![0], vec![1, 2], vec![3]]);
    assert_eq!(taken(3, "[0, [1, 2], 3]").0, [vec![0], vec![1, 2], vec![3]]);
    let (grown, silent, same) = taken(6, "zero");
    assert_eq!(grown, layers(&[0, 0, 1, 2, 2, 3]));
    assert_eq!((silent, same), (vec![false, true, false, false, true, false], Same::Same));
    for (ours, depth, words) in [
        (2, "[0]", "`depth` has 1 entries, and the model applies 2 layers"),
        (2, "[0, 4]", "the donor has no layer 4"),
        (2, "zero", "does not make 2 layers of 4"),
        (9, "stack", "does not make 9 layers of 4"),
    ] {
        let new = model(
            &format!("transplant {{ depth {depth} }}"),
            &format!("{SA}\n{MLP}\nrepeat {ours} {{ sa > mlp }}"),
        );
        let (message, ..) = refusal(&new, &dense(4));
        assert!(message.contains(words), "{depth}: {message}");
    }
}

#[test]
fn layers_of_a_loop_take_the_mean_and_each_pass_a_factor_of_the_rest() {
    let looped = |lora: &str| {
        model("", &format!("{SA}\n{MLP}\nrecur 2 residual_norm false {lora} {{ repeat 2 {{ sa > mlp }} }}"))
    };
    let old = dense(4);
    let plan = planned(&looped(""), &old).unwrap();
    let from = vec!["layers.0.mlp.up.weight".to_string(), "layers.2.mlp.up.weight".into()];
    assert_eq!(way(&plan, "layers.0.mlp.up.weight"), ("mean of 2".into(), from.clone()));
    assert!(matches!(whole(&plan), Same::IfEqual(groups) if groups.contains(&from)), "{:?}", whole(&plan));
    let plan = planned(&looped("lora 2"), &old).unwrap();
    assert_eq!(way(&plan, "layers.0.mlp.up.lora_b"), ("factor B of rank 2".into(), from.clone()));
    assert!(matches!(whole(&plan), Same::IfEqual(_)));
    // Norms have no factors: of those alone it depends at full rank.
    let plan = planned(&looped("lora 4"), &old).unwrap();
    let Same::IfEqual(groups) = whole(&plan) else { panic!("{:?}", whole(&plan)) };
    assert!(groups.iter().flatten().all(|name| name.contains("norm")), "{groups:?}");
    // `W + B_p A_p` of full rank is the donor's matrix.
    let read = |tail: &str| made(&looped("lora 4"), &old, &format!("layers.0.mlp.up.{tail}"));
    let ((w, donor), (a, _), (b, _)) = (read("weight"), read("lora_a"), read("lora_b"));
    for (pass, name) in from.iter().enumerate() {
        let donor = donor.numbers(name);
        for i in 0..6 {
            for j in 0..4 {
                let low: f32 = (0..4).map(|k| b[(pass * 6 + i) * 4 + k] * a[(pass * 4 + k) * 4 + j]).sum();
                assert!((w[i * 4 + j] + low - donor[i * 4 + j]).abs() < 0.05, "{pass} {i} {j}");
            }
        }
    }
}

#[test]
fn a_mixture_of_projections_counts_in_loops_alone() {
    // An import says nothing of projections, which layers outside loops do not read.
    let silent = model("", &format!("{}\n{MLP}\nrepeat 2 {{ sa > mlp }}", SA.replace("projection none", "")));
    assert_eq!(*whole(&planned(&dense(2), &silent).unwrap()), Same::Same);
    assert_eq!(*whole(&planned(&silent, &dense(2)).unwrap()), Same::Same);
    let looped = format!(
        "{}\n{MLP}\nrecur 2 residual_norm false {{ layer {{ sa > mlp }} }}",
        SA.replace("projection none", "")
    );
    assert!(matches!(whole(&planned(&model("", &looped), &dense(2)).unwrap()), Same::Otherwise(_)));
}

#[test]
fn a_donor_in_a_loop_is_unrolled() {
    let old = model("", &format!("{SA}\n{MLP}\nrecur 3 residual_norm false {{ layer {{ sa > mlp }} }}"));
    let plan = planned(&dense(3), &old).unwrap();
    assert_eq!(way(&plan, "layers.2.sa.out.weight").1, ["layers.0.sa.out.weight"]);
    assert_eq!(*whole(&plan), Same::Same);
}

#[test]
fn entries_of_a_map_come_before_proposals() {
    let wide = |map: &str| {
        let mlp = MLP.replace('6', "9");
        model(&format!("transplant {{ map [{map}] }}"), &format!("{SA}\n{mlp}\nrepeat 2 {{ sa > mlp }}"))
    };
    let (message, help, field) = refusal(&wide(""), &dense(2));
    assert!(
        message.contains("[9, 4]") && message.contains("[6, 4]") && help.contains("`how: pad`"),
        "{message} {help}"
    );
    assert_eq!(field, "model.components.mlp");
    let new = wide("{ to \"layers.*.mlp\" how pad }");
    let plan = planned(&new, &dense(2)).unwrap();
    assert_eq!(way(&plan, "layers.0.mlp.up.weight").0, "pad");
    assert_eq!(way(&plan, "layers.0.mlp.down.weight").0, "pad with zeros");
    assert_eq!(*whole(&plan), Same::Same);
    let (numbers, donor) = made(&new, &dense(2), "layers.0.mlp.down.weight");
    let all = donor.numbers("layers.0.mlp.down.weight");
    let expected: Vec<f32> = all.chunks(6).flat_map(|row| [row, &[0.0; 3]].concat()).collect();
    assert_eq!(numbers, expected);
    let (numbers, donor) = made(&new, &dense(2), "layers.0.mlp.up.weight");
    assert_eq!(numbers, [donor.numbers("layers.0.mlp.up.weight"), vec![-1.0; 12]].concat());
    // The other way about: the first rows and columns.
    let small = model(
        "transplant { map [{ to \"layers.*.mlp\" how slice }] }",
        &format!("{SA}\n{}\nrepeat 2 {{ sa > mlp }}", MLP.replace('6', "5")),
    );
    let (numbers, donor) = made(&small, &dense(2), "layers.0.mlp.down.weight");
    let all = donor.numbers("layers.0.mlp.down.weight");
    assert_eq!(numbers, all.chunks(6).flat_map(|row| row[..5].to_vec()).collect::<Vec<f32>>());
    // Rows of one kind, for a matrix of a definition or of a network.
    let rows = model(
        "transplant { map [{ to \"layers.*.mlp.up\" from \"layers.*.sa.k\" }] }",
        &format!("{SA}\n{}\nrepeat 2 {{ sa > mlp }}", MLP.replace('6', "8")),
    );
    let (message, ..) = refusal(&rows, &dense(2));
    assert!(message.contains("mlp.gate") || message.contains("mlp.down"), "{message}");
    let rows = model(
        "transplant { map [{ to \"layers.*.mlp.up\" from \"layers.*.sa.k\" }, { to \"layers.*.mlp\" how pad }] }",
        &format!("{SA}\n{}\nrepeat 2 {{ sa > mlp }}", MLP.replace('6', "8")),
    );
    let (numbers, donor) = made(&rows, &dense(2), "layers.1.mlp.up.weight");
    assert_eq!(numbers, donor.numbers("layers.1.sa.qkv.weight")[32..64]);
}

#[test]
fn maps_that_mean_nothing_are_refused_at_their_token() {
    let say = |map: &str| {
        let new =
            model(&format!("transplant {{ map [{map}] }}"), &format!("{SA}\n{MLP}\nrepeat 2 {{ sa > mlp }}"));
        refusal(&new, &dense(2))
    };
    for (map, words, advice, token) in [
        (
            "{ to \"layers.*.mpl\" }",
            "names no tensor of the model",
            "behind `layers.*` there is `sa`, `mlp`",
            "map[0].to",
        ),
        (
            "{ to \"layers.*.mlp\" from \"layers.*.ffn\" }",
            "names no tensor of the donor",
            "`mlp`",
            "map[0].from",
        ),
        (
            "{ to \"layers.0.mlp\" from [\"layers.0.mlp\", \"layers.7.mlp\"] }",
            "`layers.7.mlp` names no tensor",
            "there is `0`, `1`",
            "map[0].from[1]",
        ),
        (
            "{ to \"layers.*.mlp\" how zero }, { to \"layers.*.mlp\" how fresh }",
            "both name `layers.0.mlp",
            "more exact",
            "map[1].to",
        ),
        (
            "{ to \"layers.*.mlp.up\" from \"layers.*.mlp.down\" }",
            "no `copy` makes",
            "`how: fresh`",
            "map[0].to",
        ),
        (
            "{ to \"layers.*.mlp.up\" from \"layers.*.mlp.down\" how slice }",
            "no `slice` makes",
            "what does",
            "map[0].how",
        ),
    ] {
        let (message, help, field) = say(map);
        assert!(message.contains(words) && help.contains(advice), "{map}: {message} {help}");
        assert_eq!(field, format!("transplant.{token}"), "{map}");
    }
    // An entry of more words counts before one of fewer, and so does one without `*`.
    let new = model(
        "transplant { map [{ to \"layers.*.mlp\" how zero }, { to \"layers.0.mlp\" how fresh }, { to \"layers.*.mlp.up\" }] }",
        &format!("{SA}\n{MLP}\nrepeat 2 {{ sa > mlp }}"),
    );
    let plan = planned(&new, &dense(2)).unwrap();
    let words = |name: &str| way(&plan, name).0;
    assert_eq!([words("layers.0.mlp.down.weight"), words("layers.1.mlp.down.weight")], ["fresh", "zero"]);
    assert_eq!(words("layers.0.mlp.up.weight"), "copy");
}

#[test]
fn what_could_come_of_several_is_asked_about() {
    let two =
        model("", &format!("{SA}\n{MLP}\nffn = mlp {{ intermediate 6 }}\nrepeat 2 {{ sa > mlp > ffn }}"));
    let new = model(
        "",
        &format!("{SA}\nea = experts {{ count 3 active 2 intermediate 6 query 4 }}\nrepeat 2 {{ sa > ea }}"),
    );
    let (message, help, field) = refusal(&new, &two);
    assert!(message.contains("`layers.0.mlp` or `layers.0.ffn`"), "{message}");
    assert!(help.contains("{to: layers.0.ea, from: layers.0.mlp}"), "{help}");
    assert_eq!(field, "model.components.ea");
}

#[test]
fn tables_come_by_the_texts_of_tokens() {
    let (new, old) = (dense(2), dense(2));
    let sides = (Side::new(&new).unwrap(), Side::new(&old).unwrap());
    let none = Vocabulary::ByText(vec![-1; 13]);
    let error = plan(&sides.0, &sides.1, &Default::default(), &none).unwrap_err();
    assert!(error.to_string().contains("none of the 13 tokens"), "{error}");
    let some = Vocabulary::ByText((0..13).map(|i| if i < 4 { 12 - i } else { -1 }).collect());
    let plan = plan(&sides.0, &sides.1, &Default::default(), &some).unwrap();
    assert_eq!(way(&plan, "embed.weight").0, "by token text, 4 of 13");
    let donor = Counting::of(&sides.1);
    let i = plan.moves.iter().position(|m| m.to == "embed.weight").unwrap();
    let numbers = values(&plan.moves[i], sides.0.tensors[i].init, &donor).unwrap();
    let all = donor.numbers("embed.weight");
    assert_eq!(numbers[..4], all[48..]);
    assert_eq!(numbers[16..], [-1.0; 36]);
}

/// Attention over heads, and latent attention with these keys.
fn heads_and_latent(heads: &str, latent: &str) -> (Spec, Spec) {
    let of = |keys: &str| {
        model(
            "",
            &format!(
                "sa = sequence {{ heads 4 head_size 4 qk_norm none projection none {keys} }}\n{MLP}\nrepeat 2 {{ sa > mlp }}"
            ),
        )
    };
    let new = format!(
        "sa = sequence {{ heads 4 head_size 4 {} latent {{ {latent} }} }}\n{MLP}\nrepeat 2 {{ sa > mlp }}",
        heads.replace("kv_heads 2", "")
    );
    (model("", &new), of(heads))
}

#[test]
fn heads_become_latents() {
    // Of heads of 4, pair 1 is elements 1 and 3. Two heads of keys, so 2 + 4 rows each are joint.
    let (new, old) = heads_and_latent("kv_heads 2", "kv 4 turned 2 value 4 norm none keys 2 pairs low");
    let (kv, queries) = ("layers.1.sa.kv_down.weight", "layers.1.sa.q_up.weight");
    let plan = planned(&new, &old).unwrap();
    let (words, from) = way(&plan, kv);
    assert_eq!(from, ["layers.1.sa.qkv.weight"]);
    assert_eq!(words, "factor A of rank 4 of keys and values, 2 rows of a head apart");
    assert_eq!(way(&plan, queries).0, "queries in order, 2 of 4 rows of a head turn");
    assert!(
        matches!(whole(&plan), Same::Otherwise(why) if why.contains("not all turns")),
        "{:?}",
        whole(&plan)
    );
    assert!(!plan.left.iter().any(|name| name.contains("qkv")), "{:?}", plan.left);
    let read = |name: &str| made(&new, &old, name);
    let (q, donor) = read(queries);
    let all = donor.numbers("layers.1.sa.qkv.weight");
    let row = |i: usize| all[4 * i..][..4].to_vec();
    assert_eq!(q[16..32], [row(4), row(6), row(5), row(7)].concat());
    // The keys that turn are the donor's rows, the others and the values its product at full rank.
    let ((down, _), (up, _)) = (read(kv), read("layers.1.sa.kv_up.weight"));
    assert_eq!(down[16..], [row(17), row(19), row(21), row(23)].concat());
    for head in 0..4 {
        let donor = [
            vec![16 + 4 * (head / 2), 18 + 4 * (head / 2)],
            (0..4).map(|i| 24 + 4 * (head / 2) + i).collect(),
        ];
        for (i, wanted) in donor.concat().into_iter().enumerate() {
            for j in 0..4 {
                let product: f32 = (0..4).map(|k| up[(6 * head + i) * 4 + k] * down[4 * k + j]).sum();
                assert!((product - all[4 * wanted + j]).abs() < 0.05, "{head} {i} {j}: {product}");
            }
        }
    }
}

#[test]
fn latents_are_the_donor_where_all_turns_as_it_did() {
    let same = |heads: &str, latent: &str| {
        let (new, old) = heads_and_latent(heads, latent);
        whole(&planned(&new, &old).unwrap_or_else(|e| panic!("{latent}: {e}"))).clone()
    };
    for (heads, latent) in [
        // All pairs, in a rotation of their own or of a whole head.
        ("kv_heads 2", "kv 4 turned 4 value 4 norm none keys 2"),
        ("kv_heads 2", "kv 4 turned 4 value 4 norm none keys 2 pairs high"),
        ("kv_heads 2", "kv 9 turned 4 value 4 norm none keys 4 pairs uniform"),
        ("kv_heads 2", "query 4 kv 4 turned 4 value 4 norm none keys 2 pairs [0, 1]"),
        // A donor that turns in part, and one that does not.
        ("kv_heads 2 rope { base 100 share 0.5 }", "kv 4 turned 2 value 4 norm none keys 2 pairs [0]"),
        ("kv_heads 2 rope none", "kv 4 turned 2 value 4 norm none keys 2"),
    ] {
        assert_eq!(same(heads, latent), Same::Same, "{heads}: {latent}");
    }
    for (heads, latent, reason) in [
        ("kv_heads 2", "kv 4 turned 4 value 4 keys 2", "its latents are normalised"),
        ("kv_heads 2", "kv 3 turned 4 value 4 norm none keys 2", "factor A of rank 3"),
        ("kv_heads 2", "query 3 kv 4 turned 4 value 4 norm none keys 2", "factor A of rank 3 of queries"),
        ("kv_heads 2", "kv 4 turned 4 value 4 norm none", "heads share keys that turn"),
        ("kv_heads 2", "kv 4 turned 2 value 4 norm none keys 2 pairs high", "not all turns"),
    ] {
        let found = same(heads, latent);
        assert!(matches!(&found, Same::Otherwise(why) if why.contains(reason)), "{latent}: {found:?}");
    }
}

#[test]
fn heads_that_are_no_latents_are_refused_at_their_token() {
    let say = |own: &str, theirs: &str| {
        let old = model("", &format!("{theirs}\n{MLP}\nrepeat 2 {{ sa > mlp }}"));
        refusal(&model("", &format!("{own}\n{MLP}\nrepeat 2 {{ sa > mlp }}")), &old)
    };
    let plain = "sa = sequence { heads 4 kv_heads 2 head_size 4 qk_norm none projection none }";
    for (own, words, advice, token) in [
        (
            "heads 4 head_size 4 latent { kv 4 turned 2 value 3 }",
            "have 4 elements, and these 3",
            "value: 4",
            "latent.value",
        ),
        (
            "heads 2 head_size 4 latent { kv 4 turned 2 value 4 }",
            "its `heads` is 4 and this 2",
            "heads: 4",
            "heads",
        ),
        (
            "heads 4 head_size 8 latent { kv 4 turned 2 value 4 }",
            "its `head_size` is 4",
            "head_size: 4",
            "head_size",
        ),
    ] {
        let (message, help, field) = say(&format!("sa = sequence {{ {own} }}"), plain);
        assert!(message.contains(words) && help.contains(advice), "{own}: {message} {help}");
        assert_eq!(field, format!("model.components.sa.{token}"));
    }
    // A map says it in words, and says otherwise.
    let latent = "la = sequence { heads 4 head_size 4 latent { kv 4 turned 4 value 4 norm none keys 2 } }";
    let mapped = |entry: &str| {
        let before = format!("transplant {{ map [{entry}] }}");
        let new = model(&before, &format!("{latent}\n{MLP}\nrepeat 2 {{ la > mlp }}"));
        planned(&new, &model("", &format!("{plain}\n{MLP}\nrepeat 2 {{ sa > mlp }}"))).unwrap()
    };
    let entry = "{ to \"layers.*.la\" from \"layers.*.sa\" how factor }";
    assert_eq!(*whole(&mapped(entry)), Same::Same);
    assert_eq!(*whole(&mapped("")), Same::Same, "one attention comes of the only one");
    let fresh = mapped("{ to \"layers.*.la\" how fresh }");
    assert_eq!(way(&fresh, "layers.0.la.kv_up.weight"), ("fresh".into(), vec![]));
}
