// `.dream` for editors. Keys are words here, and their meanings are in the table of `dsl/src/keys.rs`:
// a new key needs no change, except for one that is written without a value, which is in FLAGS.

const FLAGS = [
  "tie", "unit_offset", "pre_norm", "post_norm", "half_reversed", "normalise", "shared", "document_mask", "begin",
  "decay_embeddings", "best", "into_input", "threshold", "norm_only", "pooled", "merge",
  "sink", "shared_gate", "biased", "truncate", "value_residual", "depth_keys", "depth_stream", "nested", "depth_choice", "recheck", "dora",
  "head_bias", "whole",
];

// Words of formulas before operands without commas.
const WORDS = ["over", "along", "at", "normal", "uniform", "ramp", "log_uniform", "inverse_softplus_uniform"];

module.exports = grammar({
  name: "dream",
  word: ($) => $.identifier,
  extras: ($) => [/[\s\uFEFF]/, $.comment],

  supertypes: ($) => [$._value],

  rules: {
    source_file: ($) => repeat($._entry),

    _entry: ($) =>
      choice($.let, $.model, $.define, $.include, $.loop, $.layer, $.definition, $.flag, $.pair, $._joined, ","),

    let: ($) => seq("let", field("name", $.identifier), "=", field("value", $._value)),
    model: ($) => seq("model", optional(field("name", choice($.identifier, $.name, $.string))), $.block),
    include: ($) => seq("include", field("path", choice($.string, $.list))),
    definition: ($) =>
      seq(field("name", $.identifier), "=", field("kind", $.identifier), field("keys", $.block)),

    pair: ($) => prec.right(seq(field("key", $.key), field("value", choice($._value, $.tagged)))),
    flag: ($) => prec.right(seq(alias(choice(...FLAGS), $.key), optional(choice("true", "false")))),
    key: ($) => choice($.identifier, $.dotted, $.string),
    tagged: ($) => prec.right(seq($.identifier, choice($.number, $.block))),

    block: ($) => seq("{", repeat($._entry), "}"),
    list: ($) => seq("[", repeat(choice($._value, ",")), "]"),

    // Layers
    loop: ($) => seq(field("kind", choice("repeat", "recur")), field("header", repeat1(choice($._sum, $.list))), $.layers),
    layer: ($) => seq(choice("layer", "body"), $.layers),
    layers: ($) => seq("{", repeat(choice($.loop, $.layer, $._composition, ",")), "}"),

    _composition: ($) => choice($._joined, $.component),
    _joined: ($) => choice($.sequential, $.parallel, $.group, $.skip),
    sequential: ($) => prec.left(1, seq($._composition, ">", $._composition)),
    parallel: ($) => prec.left(1, seq($._composition, "|", $._composition)),
    group: ($) => seq("(", $._composition, ")"),
    skip: ($) => seq("skip", "(", repeat(choice($.pair, $.flag, ",")), ")", "{", $._composition, "}"),
    component: ($) => $.identifier,

    // Formulas
    define: ($) =>
      seq("define", field("name", $.identifier), optional($.settings), "{", repeat($._statement), "}"),
    settings: ($) => seq("(", repeat(choice($.setting, ",")), ")"),
    setting: ($) => prec.right(seq(field("name", $.identifier), optional("="), optional($._sum))),
    _statement: ($) => choice($.assignment, $.recurrence, $.loss, $.return),
    assignment: ($) => seq(field("name", $.identifier), "=", $._formula),
    loss: ($) => seq("loss", $._formula),
    return: ($) => seq("return", $._formula),
    recurrence: ($) => seq("recurrence", $.state, repeat(seq(",", $.state)), "{", repeat($._statement), "}"),
    state: ($) => seq(field("name", $.identifier), optional($.dimensions), optional(seq("from", $._beginning))),
    // A brace after a call there begins the statements.
    _beginning: ($) =>
      choice($.number, seq("-", $.number), $.identifier, alias($._plain_call, $.call)),
    dimensions: ($) => seq("[", repeat(choice($.dimension, ",")), "]"),
    dimension: ($) => seq(field("name", $.identifier), optional(seq(":", $._formula))),

    _formula: ($) => choice($._term, $.operation),
    operation: ($) =>
      choice(
        prec.left(1, seq($._formula, "or", $._formula)),
        prec.left(2, seq($._formula, "and", $._formula)),
        prec.left(3, seq($._formula, choice("<", "<=", ">", ">=", "==", "!="), $._formula)),
        prec.left(4, seq($._formula, choice("+", "-"), $._formula)),
        prec.left(5, seq($._formula, choice("*", "/"), $._formula)),
        prec(6, seq(choice("-", "not"), $._formula)),
      ),
    _term: ($) => choice($.number, $.identifier, $.dotted, $.call, $.index, seq("(", $._formula, ")")),
    call: ($) => prec.right(seq($._plain_call, optional($.block))),
    _plain_call: ($) =>
      seq(field("function", $.identifier), "(", optional(seq($._argument, repeat(seq(",", $._argument)))), ")"),
    _argument: ($) => choice($._formula, $.dimensions, $.named, $.words),
    named: ($) => seq(field("name", $.identifier), "=", $._formula),
    words: ($) => seq(choice(...WORDS), repeat1($._operand)),
    _operand: ($) => choice($.number, $.identifier, seq("-", $.number)),
    index: ($) => seq(field("value", $.identifier), "[", $._formula, repeat(seq(",", $._formula)), "]"),

    // Values
    _value: ($) => choice($.block, $.list, $.string, $.path, $._sum),
    _sum: ($) => choice($._atom, $.arithmetic, $.negative),
    arithmetic: ($) =>
      choice(
        prec.left(2, seq($._sum, choice("+", "-"), $._sum)),
        prec.left(3, seq($._sum, choice("*", "/"), $._sum)),
      ),
    negative: ($) => prec(4, seq("-", $._sum)),
    _atom: ($) => choice($.number, $.boolean, $.identifier, $.dotted, $.parenthesized),
    parenthesized: ($) => seq("(", $._sum, ")"),

    boolean: () => choice("true", "false"),
    number: () => /[0-9]+(_[0-9]+)*(\.[0-9]+)?([eE][+-]?[0-9]+)?%?/,
    string: () => /"(\\.|[^"\n\\])*"/,
    identifier: () => /[A-Za-z_][A-Za-z0-9_]*/,
    dotted: () => /[A-Za-z_][A-Za-z0-9_]*(\.[A-Za-z_][A-Za-z0-9_]*)+/,
    name: () => /[A-Za-z0-9_][A-Za-z0-9_.-]*/,
    path: () => token(prec(1, /[A-Za-z0-9_.\/-]+\.(txt|json|jsonl|yaml|dream|parquet|csv)/)),
    comment: () => token(seq("//", /[^\n]*/)),
  },
});
