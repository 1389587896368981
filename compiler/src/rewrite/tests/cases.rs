//! Functions on which rules fire, and functions that look alike on which they must not.

use super::Case;

const ROUTED: &str = "dims { batch {a} seq {b} hidden {c} out {d} experts {d} experts1 {d+1} one 1 tokens {slots} }
func @f {
  input %n : f32[batch, seq, hidden]
  input %z : f32[batch, seq, experts]
  weight %w : f32[experts, out, hidden]
  weight %shared : f32[out, hidden]
  %0 = route %z choose one : i32[batch, seq, one]
  %1, %2, %3 = group %0 experts experts offsets experts1 slots tokens : i32[tokens], i32[experts1], i32[batch, seq, one]
  %4 = gather %n, %1 : f32[tokens, hidden]
  %5 = grouped %4, %w, %2 over hidden : f32[tokens, out]
  %6 = combine %5, %3 : f32[batch, seq, out]
";

/// The same with one candidate more than there are experts: its rows are in no group.
const NOOP: &str = "dims { batch {a} seq {b} hidden {c} out {d} experts {d} experts1 {d+1} one 1 tokens {slots} }
func @f {
  input %n : f32[batch, seq, hidden]
  input %z : f32[batch, seq, experts1]
  weight %w : f32[experts, out, hidden]
  weight %shared : f32[out, hidden]
  %0 = route %z choose one : i32[batch, seq, one]
  %1, %2, %3 = group %0 experts experts offsets experts1 slots tokens : i32[tokens], i32[experts1], i32[batch, seq, one]
  %4 = gather %n, %1 : f32[tokens, hidden]
  %5 = grouped %4, %w, %2 over hidden : f32[tokens, out]
  %6 = combine %5, %3 : f32[batch, seq, out]
";

const ALONE: &str = "dims { batch {a} seq {b} hidden {c} out {d} experts 1 experts1 2 one 1 tokens {slots} }
func @f {
  input %n : f32[batch, seq, hidden]
  input %z : f32[batch, seq, experts]
  input %g : f32[batch, seq, one]
  weight %w : f32[experts, out, hidden]
  %0 = route %z choose one : i32[batch, seq, one]
  %1, %2, %3 = group %0 experts experts offsets experts1 slots tokens : i32[tokens], i32[experts1], i32[batch, seq, one]
  %4 = gather %n, %1 : f32[tokens, hidden]
  %5 = grouped %4, %w, %2 over hidden : f32[tokens, out]
  %6 = combine %5, %3, %g : f32[batch, seq, out]
  return y = %6
}";

/// Every expert for every row.
const ALL: &str = "dims { batch {a} seq {b} hidden {c} inner {d} experts {e} experts1 {e+1} k {e} slots {s} }
func @f {
  input %n : f32[batch, seq, hidden]
  input %z : f32[batch, seq, experts]
  weight %gate : f32[experts, inner, hidden]
  weight %up : f32[experts, inner, hidden]
  weight %down : f32[experts, hidden, inner]
  %0 = route %z choose k : i32[batch, seq, k]
  %1, %2, %3 = group %0 experts experts offsets experts1 slots slots : i32[slots], i32[experts1], i32[batch, seq, k]
  %4 = pick %z, %0 : f32[batch, seq, k]
  %5 = sigmoid %4 : f32[batch, seq, k]
  %6 = sum %5 over [k] : f32[batch, seq]
  %7 = div %5, %6 : f32[batch, seq, k]
  %8 = gather %n, %1 : f32[slots, hidden]
  %9 = grouped %8, %gate, %2 over hidden : f32[slots, inner]
  %10 = grouped %8, %up, %2 over hidden : f32[slots, inner]
  %11 = silu %9 : f32[slots, inner]
  %12 = mul %11, %10 : f32[slots, inner]
  %13 = grouped %12, %down, %2 over inner : f32[slots, hidden]
  %14 = combine %13, %3, %7 : f32[batch, seq, hidden]
  return y = %14
}";

/// Gates of several experts for each row, one of them a no-op, and what the backward reads.
const GATED: &str = "dims { batch {a} seq {b} hidden {c} inner {d} experts {e} experts1 {e+1} k {e} slots {s} }
func @f {
  input %z : f32[batch, seq, experts1]
  input %g : f32[batch, seq, k]
  input %a : f32[slots, inner]
  input %d : f32[batch, seq, hidden]
  weight %down : f32[experts, hidden, inner]
  %0 = route %z choose k : i32[batch, seq, k]
  %1, %2, %3 = group %0 experts experts offsets experts1 slots slots : i32[slots], i32[experts1], i32[batch, seq, k]
  %4 = grouped %a, %down, %2 over inner : f32[slots, hidden]
";

/// The tokens with the largest scores, of six.
const TAKEN: &str = "dims { batch {a} seq 6 taken 6 hidden {c} }
func @f {
  input %x : f32[batch, seq, hidden]
  input %r : f32[batch, seq]
  input %d : f32[batch, taken, hidden]
  %0 = top_tokens %r choose taken : i32[batch, taken]
";

const MATRICES: &str = "dims { batch {a} seq {b} hidden {c} o1 {d} o2 {e} }
func @f {
  input %x : f32[batch, seq, hidden]
  input %u : f32[o2, hidden]
  weight %g : f32[hidden]
  weight %v : f32[o1, hidden]
  weight %w : f32[o2, hidden]
  weight %down : f32[o2, o1]
";

const DEPTH: &str = "dims { batch {a} seq {b} rows 3 heads {c} kv {c} size {e} few 1 many 4 }
func @f {
  input %q : f32[batch, seq, heads, size]
  input %k : f32[batch, seq, kv, size]
  input %v : f32[batch, seq, kv, size]
  state %keys : f32[rows, batch, seq, kv, size]
  state %values : f32[rows, batch, seq, kv, size]
  index %zero : i32[]
  index %row : i32[]
";

const ATTENTION: &str = "dims { batch {a} seq {b} heads {c} size {e} }
func @f {
  input %q : f32[batch, seq, heads, size]
  input %k : f32[batch, seq, heads, size]
  input %v : f32[batch, seq, heads, size]
  input %positions : i32[batch, seq]
  weight %gain : f32[size]
";

const ROWS: &str = "dims { batch {a} seq {b} hidden {e} vocab {d} one 1 }
func @f {
  input %x : f32[batch, seq, hidden]
  input %y : f32[batch, seq, hidden]
  input %s : f32[batch, seq]
  input %t : f32[batch, seq]
  input %positions : i32[batch, seq]
  input %targets : i32[batch, seq]
  input %gate : f32[batch, seq, one]
  weight %w : f32[vocab, hidden]
";

/// A gated delta rule; `{update}` stands for the last lines of its step.
const STEPS: &str = "dims { batch {a} seq {b} h {c} v {d} k {e} }
func @f {
  input %q : f32[batch, seq, h, k]
  input %key : f32[batch, seq, h, k]
  input %val : f32[batch, seq, h, v]
  input %g : f32[batch, seq, h]
  input %rate : f32[batch, seq, h]
  weight %c : f32[h]
  %0 = sigmoid %g : f32[batch, seq, h]
  %1 = {begin} : f32[h, v, k]
  %2 = recurrence %q, %key, %val, %0, %rate, %c, %1 step {
    state %S : f32[h, v, k]
    input %q : f32[h, k]
    input %key : f32[h, k]
    input %val : f32[h, v]
    input %a : f32[h]
    input %rate : f32[h]
    weight %c : f32[h]
    %0 = mul %S, %a : f32[h, v, k]
    %1 = mul %0, %key : f32[h, v, k]
    %2 = sum %1 over [k] : f32[h, v]
    %3 = zeros [h, v, k] : f32[h, v, k]
    {update}
  } : f32[batch, seq, h, v]
  return y = %2
";

/// The step of [`STEPS`] from its own lines.
fn steps(begin: &str, update: &str) -> String {
    STEPS.replace("{begin}", begin).replace("{update}", update)
}

/// A delta rule with what is read of the new state.
const DELTA: &str = "%4 = sub %val, %2 : f32[h, v]
    %5 = mul %4, %rate : f32[h, v]
    %6 = add %3, %5 : f32[h, v, k]
    %7 = mul %6, %key : f32[h, v, k]
    %8 = add %0, %7 : f32[h, v, k]
    %9 = mul %8, %q : f32[h, v, k]
    %10 = sum %9 over [k] : f32[h, v]
    %11 = mul %10, %c : f32[h, v]
    %12 = add %11, %val : f32[h, v]
    return o = %12, S = %8";

/// Linear attention that reads the state before the token.
const BEFORE: &str = "%4 = add %3, %val : f32[h, v, k]
    %5 = mul %4, %key : f32[h, v, k]
    %6 = add %0, %5 : f32[h, v, k]
    %7 = mul %S, %q : f32[h, v, k]
    %8 = sum %7 over [k] : f32[h, v]
    return o = %8, S = %6";

/// A state that goes through a function.
const BENT: &str = "%4 = add %3, %val : f32[h, v, k]
    %5 = mul %4, %key : f32[h, v, k]
    %6 = add %0, %5 : f32[h, v, k]
    %7 = tanh %6 : f32[h, v, k]
    %8 = mul %7, %q : f32[h, v, k]
    %9 = sum %8 over [k] : f32[h, v]
    return o = %9, S = %7";

pub(super) fn cases() -> Vec<Case> {
    let case = |rule, with, start: &str, rest: &str, fires| Case {
        rule,
        with,
        text: format!("{start}{rest}\n"),
        fires,
    };
    let on = |rule, start, rest| case(rule, &[][..], start, rest, true);
    let off = |rule, start, rest| case(rule, &[][..], start, rest, false);
    vec![
        // --- head-loss ---
        on("head-loss", ROWS, "%0 = contract %x, %w over [hidden] : f32[batch, seq, vocab]
            %1, %2 = cross_entropy %0, %targets : f32[batch, seq], f32[batch, seq] return nll = %1, lse = %2 }"),
        on("head-loss", ROWS, "%0 = contract %x, %w over [hidden] : f32[batch, seq, vocab]
            %1 = constant 0.25 : f32[] %2 = mul %0, %1 : f32[batch, seq, vocab] %3 = tanh %2 : f32[batch, seq, vocab]
            %4 = constant 4 : f32[] %5 = mul %3, %4 : f32[batch, seq, vocab]
            %6, %7 = cross_entropy %5, %targets : f32[batch, seq], f32[batch, seq] return nll = %6, lse = %7 }"),
        // A cap whose two numbers do not belong together.
        off("head-loss", ROWS, "%0 = contract %x, %w over [hidden] : f32[batch, seq, vocab]
            %1 = constant 0.5 : f32[] %2 = mul %0, %1 : f32[batch, seq, vocab] %3 = tanh %2 : f32[batch, seq, vocab]
            %4 = constant 4 : f32[] %5 = mul %3, %4 : f32[batch, seq, vocab]
            %6, %7 = cross_entropy %5, %targets : f32[batch, seq], f32[batch, seq] return nll = %6, lse = %7 }"),
        // --- window ---
        on("window", ATTENTION, "%0, %1 = attention %q, %k, %v scale 0.5 window 5 mask causal : f32[batch, seq, heads, size], f32[batch, seq, heads] return o = %0 }"),
        // Positions may be farther apart than there are keys.
        off("window", ATTENTION, "%0, %1 = attention %q, %k, %v, %positions, %positions scale 0.5 window 5 mask positions : f32[batch, seq, heads, size], f32[batch, seq, heads] return o = %0 }"),
        off("window", &ATTENTION.replace("seq {b}", "seq 6"), "%0, %1 = attention %q, %k, %v scale 0.5 window 5 mask causal : f32[batch, seq, heads, size], f32[batch, seq, heads] return o = %0 }"),
        // --- linear-attention ---
        on("linear-attention", &steps("zeros [h, v, k]", DELTA), "}"),
        on("linear-attention", &steps("zeros [h, v, k]", BEFORE), "}"),
        off("linear-attention", &steps("zeros [h, v, k]", BENT), "}"),
        // A decay of any sign.
        off("linear-attention", &steps("zeros [h, v, k]", BEFORE).replace("sigmoid %g", "tanh %g"), "}"),
        // --- depth-zero ---
        on("depth-zero", DEPTH, "%0 = cache_write %keys, %k, %zero : f32[rows, batch, seq, kv, size] %1 = cache_write %values, %v, %zero : f32[rows, batch, seq, kv, size]
            %2 = depth_attention %q, %0, %1, %zero scale 0.5 mask causal : f32[batch, seq, heads, size] return o = %2, keys = %0, values = %1 }"),
        on("depth-zero", &DEPTH.replace("rows 3", "rows 1"), "%0 = cache_write %keys, %k, %row : f32[rows, batch, seq, kv, size] %1 = cache_write %values, %v, %row : f32[rows, batch, seq, kv, size]
            %2 = depth_attention %q, %0, %1, %row scale 0.5 mask causal : f32[batch, seq, heads, size] return o = %2, keys = %0, values = %1 }"),
        // A row that the loops supply.
        off("depth-zero", DEPTH, "%0 = cache_write %keys, %k, %row : f32[rows, batch, seq, kv, size] %1 = cache_write %values, %v, %row : f32[rows, batch, seq, kv, size]
            %2 = depth_attention %q, %0, %1, %row scale 0.5 mask causal : f32[batch, seq, heads, size] return o = %2, keys = %0, values = %1 }"),
        // Four query heads on one key head.
        off("depth-zero", &DEPTH.replace("heads {c} kv {c}", "heads 4 kv 1"), "%0 = cache_write %keys, %k, %zero : f32[rows, batch, seq, kv, size] %1 = cache_write %values, %v, %zero : f32[rows, batch, seq, kv, size]
            %2 = depth_attention %q, %0, %1, %zero scale 0.5 mask causal : f32[batch, seq, heads, size] return o = %2, keys = %0, values = %1 }"),
        // --- norms ---
        on("norm-of-norm", ROWS, "%0 = rms %x inner 1 eps 0.01 : f32[batch, seq, hidden] %1 = rms %0 inner 1 eps 0.1 : f32[batch, seq, hidden] return y = %1 }"),
        off("norm-of-norm", ROWS, "%0 = rms %x inner 2 eps 0.01 : f32[batch, seq, hidden] %1 = rms %0 inner 1 eps 0.1 : f32[batch, seq, hidden] return y = %1 }"),
        off("norm-of-norm", ROWS, "%0 = rms %x inner 1 eps 0.01 : f32[batch, seq, hidden] %1 = mul %0, %y : f32[batch, seq, hidden] %2 = rms %1 inner 1 eps 0.1 : f32[batch, seq, hidden] return y = %2 }"),
        on("norm-rotation", ROWS, "%0 = rope %x, %positions base 100 tokens : f32[batch, seq, hidden] %1 = rms %0 inner 1 eps 0.01 : f32[batch, seq, hidden] return y = %1 }"),
        // A gain between them does not commute with the rotation.
        off("norm-rotation", ROWS, "%0 = rope %x, %positions base 100 tokens : f32[batch, seq, hidden] %1 = mul %0, %y : f32[batch, seq, hidden] %2 = rms %1 inner 1 eps 0.01 : f32[batch, seq, hidden] return y = %2 }"),
        // --- one expert, one gate ---
        on("one-expert", ALONE, ""),
        off("one-expert", &ROUTED.replace("experts {d} experts1 {d+1}", "experts 2 experts1 3"), "return y = %6 }"),
        // One expert and one no-op.
        off("one-expert", &NOOP.replace("experts {d} experts1 {d+1}", "experts 1 experts1 2"), "return y = %6 }"),
        // --- all experts ---
        on("all-experts", ALL, ""),
        // One expert fewer than there are.
        off("all-experts", &ALL.replace("experts {e} experts1 {e+1}", "experts 7 experts1 8"), ""),
        // A candidate that is no expert.
        off("all-experts", &ALL.replace("%z : f32[batch, seq, experts]", "%z : f32[batch, seq, experts1]"), ""),
        // --- all tokens ---
        on("all-tokens", TAKEN, "%1 = take_tokens %x, %0 : f32[batch, taken, hidden] %2 = square %1 : f32[batch, taken, hidden]
            %3 = put_tokens %2, %0 tokens seq : f32[batch, seq, hidden] return y = %3, x = %1 }"),
        // One of six is left out.
        off("all-tokens", &TAKEN.replace("taken 6", "taken 5"), "%1 = take_tokens %x, %0 : f32[batch, taken, hidden] %2 = put_tokens %d, %0 tokens seq : f32[batch, seq, hidden] return y = %1, z = %2 }"),
        // Places that somebody else chose, in any order.
        off("all-tokens", &TAKEN.replace("  %0 = top_tokens %r choose taken : i32[batch, taken]\n", "  input %i : i32[batch, taken]\n"),
            "%0 = take_tokens %x, %i : f32[batch, taken, hidden] return y = %0 }"),
        on("one-gate", ROWS, "%0 = sigmoid %gate : f32[batch, seq, one] %1 = sum %0 over [one] : f32[batch, seq] %2 = div %0, %1 : f32[batch, seq, one] return y = %2 }"),
        on("one-gate", ROWS, "%0 = softmax %gate : f32[batch, seq, one] return y = %0 }"),
        // Without the sigmoid it may be 0 / 0, and a sum over more than one is no unit.
        off("one-gate", ROWS, "%0 = sum %gate over [one] : f32[batch, seq] %1 = div %gate, %0 : f32[batch, seq, one] return y = %1 }"),
        off("one-gate", ROWS, "%0 = sigmoid %x : f32[batch, seq, hidden] %1 = sum %0 over [hidden] : f32[batch, seq] %2 = div %0, %1 : f32[batch, seq, hidden] return y = %2 }"),
        off("one-gate", ROWS, "%0 = softmax %x : f32[batch, seq, hidden] return y = %0 }"),
        // --- single ---
        on("single", ROWS, "%0 = sum %gate over [one] : f32[batch, seq] return y = %0 }"),
        on("single", ROWS, "%0 = arrange %x to [batch, seq, one, hidden] : f32[batch, seq, one, hidden] return y = %0 }"),
        off("single", ROWS, "%0 = sum %x over [hidden] : f32[batch, seq] return y = %0 }"),
        off("single", ROWS, "%0 = arrange %gate to [one, batch, seq] : f32[one, batch, seq] return y = %0 }"),
        // --- unit ---
        on("unit", ROWS, "%0 = constant 1 : f32[] %1 = mul %x, %0 : f32[batch, seq, hidden] %2 = zeros [batch, seq, hidden] : f32[batch, seq, hidden]
            %3 = add %1, %2 : f32[batch, seq, hidden] %4 = mul %2, %y : f32[batch, seq, hidden] %5 = add %3, %4 : f32[batch, seq, hidden] return y = %5 }"),
        off("unit", ROWS, "%0 = constant 1 : f32[] %1 = add %x, %0 : f32[batch, seq, hidden] return y = %1 }"),
        // Adding zeros of more dimensions broadcasts.
        off("unit", ROWS, "%0 = zeros [batch, seq, hidden] : f32[batch, seq, hidden] %1 = add %0, %s : f32[batch, seq, hidden] return y = %1 }"),
        // --- stop-gradient, factor ---
        on("stop-gradient", ROWS, "%0 = stop_gradient %x : f32[batch, seq, hidden] %1 = square %0 : f32[batch, seq, hidden] return y = %1 }"),
        off("stop-gradient", ROWS, "%0 = square %x : f32[batch, seq, hidden] return y = %0 }"),
        on("factor", ROWS, "%0 = mul %x, %s : f32[batch, seq, hidden] %1 = mul %y, %s : f32[batch, seq, hidden] %2 = add %0, %1 : f32[batch, seq, hidden] return y = %2 }"),
        off("factor", ROWS, "%0 = mul %x, %s : f32[batch, seq, hidden] %1 = mul %y, %t : f32[batch, seq, hidden] %2 = add %0, %1 : f32[batch, seq, hidden] return y = %2 }"),
        // --- merge-shared, shared-gradient ---
        on("merge-shared", ROUTED, "%7 = contract %n, %shared over [hidden] : f32[batch, seq, out] %8 = add %6, %7 : f32[batch, seq, out] return y = %8 }"),
        on("merge-shared", ROUTED, "%7 = contract %n, %shared over [hidden] : f32[batch, seq, out] %8 = add %7, %6 : f32[batch, seq, out] return y = %8 }"),
        // Rows of a no-op have the shared expert alone.
        off("merge-shared", NOOP, "%7 = contract %n, %shared over [hidden] : f32[batch, seq, out] %8 = add %6, %7 : f32[batch, seq, out] return y = %8 }"),
        // The shared expert reads something else.
        off("merge-shared", ROUTED, "%7 = square %n : f32[batch, seq, hidden] %8 = contract %7, %shared over [hidden] : f32[batch, seq, out] %9 = add %6, %8 : f32[batch, seq, out] return y = %9 }"),
        on("shared-gradient", ROUTED, "%7 = gather %6, %1 : f32[tokens, out] %8 = grouped_outer %7, %4, %2 experts experts : f32[experts, out, hidden]
            %9 = contract %6, %n over [batch, seq] : f32[out, hidden] return d.w = %8, d.shared = %9 }"),
        off("shared-gradient", NOOP, "%7 = gather %6, %1 : f32[tokens, out] %8 = grouped_outer %7, %4, %2 experts experts : f32[experts, out, hidden]
            %9 = contract %6, %n over [batch, seq] : f32[out, hidden] return d.w = %8, d.shared = %9 }"),
        // --- gate-gradient ---
        on("gate-gradient", GATED, "%5 = combine_gates %d, %4, %3 : f32[batch, seq, k] %6 = combine_grad %d, %1, %g : f32[slots, hidden]
            %7 = grouped %6, %down, %2 over hidden : f32[slots, inner] %8 = grouped_outer %6, %a, %2 experts experts : f32[experts, hidden, inner]
            return d.g = %5, d.a = %7, d.w = %8 }"),
        on("gate-gradient", GATED, "%5 = combine_gates %d, %4, %3 : f32[batch, seq, k] return d.g = %5 }"),
        // Something is added to the experts' outputs.
        off("gate-gradient", GATED, "%5 = square %4 : f32[slots, hidden] %6 = combine_gates %d, %5, %3 : f32[batch, seq, k] return d.g = %6 }"),
        // --- weights ---
        on("fold-gain", MATRICES, "%0 = mul %x, %g : f32[batch, seq, hidden] %1 = contract %0, %v over [hidden] : f32[batch, seq, o1] return y = %1 }"),
        on("fold-gain", ROUTED, "%7 = sum %shared over [out] : f32[hidden] %8 = mul %n, %7 : f32[batch, seq, hidden] %9 = gather %8, %1 : f32[tokens, hidden]
            %10 = grouped %9, %w, %2 over hidden : f32[tokens, out] return y = %10 }"),
        // A matrix that is no weight.
        off("fold-gain", MATRICES, "%0 = mul %x, %g : f32[batch, seq, hidden] %1 = contract %0, %u over [hidden] : f32[batch, seq, o2] return y = %1 }"),
        on("fold-scale", MATRICES, "%0 = contract %x, %v over [hidden] : f32[batch, seq, o1] %1 = constant 0.3 : f32[] %2 = mul %0, %1 : f32[batch, seq, o1] return y = %2 }"),
        off("fold-scale", MATRICES, "%0 = contract %x, %u over [hidden] : f32[batch, seq, o2] %1 = constant 0.3 : f32[] %2 = mul %0, %1 : f32[batch, seq, o2] return y = %2 }"),
        on("attention-scale", ATTENTION, "%0 = rms %q inner 1 eps 0.01 : f32[batch, seq, heads, size] %1 = mul %0, %gain : f32[batch, seq, heads, size]
            %2 = rope %1, %positions base 100 tokens : f32[batch, seq, heads, size]
            %3, %4 = attention %2, %k, %v scale 0.3 mask causal : f32[batch, seq, heads, size], f32[batch, seq, heads] return o = %3 }"),
        off("attention-scale", ATTENTION, "%0 = rms %q inner 1 eps 0.01 : f32[batch, seq, heads, size]
            %1, %2 = attention %0, %k, %v scale 0.3 mask causal : f32[batch, seq, heads, size], f32[batch, seq, heads] return o = %1 }"),
        on("stack", MATRICES, "%0 = contract %x, %v over [hidden] : f32[batch, seq, o1] %1 = contract %x, %w over [hidden] : f32[batch, seq, o2] return p = %0, q = %1 }"),
        case("stack", &["fold-gain"], MATRICES, "%0 = mul %x, %g : f32[batch, seq, hidden] %1 = contract %0, %v over [hidden] : f32[batch, seq, o1] %2 = contract %x, %w over [hidden] : f32[batch, seq, o2] return p = %1, q = %2 }", true),
        off("stack", MATRICES, "%0 = contract %x, %v over [hidden] : f32[batch, seq, o1] %1 = contract %x, %u over [hidden] : f32[batch, seq, o2] return p = %0, q = %1 }"),
        on("stack-experts", ROUTED, "%7 = square %w : f32[experts, out, hidden] %8 = grouped %4, %7, %2 over hidden : f32[tokens, out] return p = %5, q = %8 }"),
        off("stack-experts", ROUTED, "%7 = square %w : f32[experts, out, hidden] %8 = square %4 : f32[tokens, hidden] %9 = grouped %8, %7, %2 over hidden : f32[tokens, out] return p = %5, q = %9 }"),
        on("low-rank", MATRICES, "%0 = contract %x, %v over [hidden] : f32[batch, seq, o1] %1 = contract %0, %down over [o1] : f32[batch, seq, o2] return y = %1 }"),
        on("low-rank", MATRICES, "%0 = contract %down, %v over [o1] : f32[o2, hidden] %1 = contract %x, %0 over [hidden] : f32[batch, seq, o2] return y = %1 }"),
        // Something happens in between.
        off("low-rank", MATRICES, "%0 = contract %x, %v over [hidden] : f32[batch, seq, o1] %1 = silu %0 : f32[batch, seq, o1] %2 = contract %1, %down over [o1] : f32[batch, seq, o2] return y = %2 }"),
    ]
}
