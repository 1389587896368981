"""The reference's own check: `python -m unittest -v` in this folder.

What is compared here was written a second time, in plain loops or in another form, or is a property that must hold.
"""

import math
import re
import unittest
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from safetensors.numpy import load_file

from make_goldens import CASES, FOLDER, draw, text
from reference import (
    Forward, Model, depth_positions, evaluate, gelu_by_error_function, loss_and_gradients, parse, read_spec, rms_norm,
    rotate, scaled_frequencies, sinkhorn, split_weights, train,
)  # fmt: skip


def load(case, edit=lambda spec: None, seed=0):
    """A case's model with weights and ids drawn afresh."""
    spec = read_spec(text(case))
    edit(spec["model"])
    model, rng = Model(spec["model"], spec["train"].get("z_loss", 0.0)), np.random.default_rng(seed)
    return model, draw(model, model.shapes(), rng), rng.integers(0, model.vocab, (2, 8))


def body(items):
    return lambda model: model.update(body=items)


@partial(jax.jit, static_argnums=0)
def logits_of(model, weights, ids):
    return Forward(model, weights).run(ids)


@partial(jax.jit, static_argnums=0)
def replayed_loss(model, weights, ids, stopped):
    forward = Forward(model, weights, stopped)
    return forward.loss(forward.run(ids[:, :-1]), ids[:, 1:])


class Formulas(unittest.TestCase):
    def test_rope_turns_complex_numbers(self):
        """Pair (i, i + d/2) as a complex number times e^(i·angle)."""
        x, d = np.random.default_rng(0).standard_normal((5, 6)), 6
        turned = np.array(rotate(x, np.arange(5.0)[:, None], 10000))
        for p in range(5):
            for i in range(d // 2):
                z = complex(x[p, i], x[p, i + 3]) * np.exp(1j * p * 10000 ** (-2 * i / d))
                np.testing.assert_allclose([turned[p, i], turned[p, i + 3]], [z.real, z.imag], atol=1e-14)

    def test_half_reversed_positions(self):
        np.testing.assert_array_equal(depth_positions(1, 5, 8, True), [1, 3, 1, 3])
        np.testing.assert_array_equal(depth_positions(1, 5, 8, False), [1, 1, 1, 1])

    def test_sequence_attention_in_loops(self):
        for case, name in [("window", "sa"), ("gemma", "local"), ("la", "sa")]:
            model, w, _ = load(case)
            c, prefix = model.components[name], f"layers.0.{name}"
            x = np.random.default_rng(1).standard_normal((2, 7, model.hidden))
            heads, group, d = c["heads"], c["heads"] // c["kv_heads"], c["head_size"]
            expected = np.zeros_like(x)
            for b in range(2):
                qkv = [w[f"{prefix}.qkv.weight"] @ x[b, t] for t in range(7)]

                def vector(t, row, gain=None):
                    u = qkv[t][row * d : (row + 1) * d]
                    if gain is not None and c["qk_norm"] == "rms":
                        u = u / np.sqrt(np.mean(u**2) + 1e-6) * w[f"{prefix}.{gain}.weight"]
                    return u if gain is None else np.array(rotate(u, float(t), c["rope"]["base"]))

                for t in range(7):
                    mixed = []
                    for j in range(heads):
                        q, total, value = vector(t, j, "q_norm"), 0.0, 0.0
                        for s in range(t + 1):
                            if c["window"] and t - s >= c["window"]:
                                continue
                            score = q @ vector(s, heads + j // group, "k_norm") * (c["scale"] or d**-0.5)
                            if c["softcap"]:
                                score = c["softcap"] * np.tanh(score / c["softcap"])
                            total += np.exp(score)
                            value = value + np.exp(score) * vector(s, heads + c["kv_heads"] + j // group)
                        mixed.append(value / total)
                    expected[b, t] = w[f"{prefix}.out.weight"] @ np.concatenate(mixed)
            got = Forward(model, w).attention(name, c, prefix, x, 0, model.layers[0])
            np.testing.assert_allclose(got, expected, atol=1e-12)

    def test_depth_attention_in_loops(self):
        """Three layers attend over each other through one cache, each with its own weights."""
        model, w, _ = load("la_da")
        c, d, xs = model.components["da"], 4, np.random.default_rng(1).standard_normal((3, 1, 1, model.hidden))
        forward, keys, values = Forward(model, w), [], []
        for l in range(3):
            prefix = f"layers.{l}.da"
            q, k, v = (w[f"{prefix}.qkv.weight"] @ xs[l, 0, 0]).reshape(3, d)
            q, k = (
                np.array(rotate(rms_norm(u, w[f"{prefix}.{g}.weight"]), np.array([l, 2.0 - l]), 500))
                for u, g in [(q, "q_norm"), (k, "k_norm")]
            )
            keys.append(k), values.append(v)
            e = np.exp([q @ k / 2 for k in keys])
            expected = w[f"{prefix}.out.weight"] @ (e / e.sum() @ np.array(values))
            got = forward.attention("da", c, prefix, xs[l], l, model.layers[l])
            np.testing.assert_allclose(got[0, 0], expected, atol=1e-12)

    def test_experts_one_token_at_a_time(self):
        model, w, _ = load("dr")
        prefix, l = "layers.0.ea", 2
        x = np.random.default_rng(1).standard_normal((1, 6, model.hidden))
        forward = Forward(model, w)
        got, counts = forward.experts(model.components["ea"], prefix, x, l), np.zeros(5)
        for t in range(6):
            q = rms_norm(w[f"{prefix}.router.query.weight"] @ x[0, t], w[f"{prefix}.router.q_norm.weight"])
            q = np.array(rotate(q, np.array([2.0, 1.0, 2.0]), 500))  # of depth 4: odd pairs stand at 3 - 2
            z = [
                q @ rms_norm(k, w[f"{prefix}.router.k_norm.weight"]) / 6**0.5
                for k in w[f"{prefix}.router.keys.weight"]
            ]
            chosen = sorted(range(5), key=lambda e: -(z[e] + w[f"{prefix}.router.bias"][e]))[:2]
            score, y = {e: 1 / (1 + np.exp(-z[e])) for e in chosen}, 0
            for e in chosen:
                counts[e] += 1
                g, u = w[f"{prefix}.gate.weight"][e] @ x[0, t], w[f"{prefix}.up.weight"][e] @ x[0, t]
                y = y + score[e] / sum(score.values()) * w[f"{prefix}.down.weight"][e] @ (g / (1 + np.exp(-g)) * u)
            np.testing.assert_allclose(got[0, t], y, atol=1e-12)
        np.testing.assert_array_equal(forward.counts[f"{prefix}.router.bias"], counts)

    def test_projection_experts_merge(self):
        """Equation 8: the value is that of one matrix, W_e + W_shared, times the score."""
        model, w, _ = load("dr")
        x = np.random.default_rng(1).standard_normal((1, 6, model.hidden))
        forward, prefix = Forward(model, w), "layers.0.sa"
        score, chosen = forward.route(prefix, x, 1, active=1)
        got = forward.projection_experts(prefix, x, 1)("qkv", x)
        for t in range(6):
            e = int(np.argmax(chosen[0, t]))
            merged = w[f"{prefix}.qkv.weight"][e] + w[f"{prefix}.qkv.shared.weight"]
            np.testing.assert_allclose(got[0, t], score[0, t, e] * merged @ x[0, t], atol=1e-12)

    def test_ties_go_to_the_lowest_index(self):
        model, w, _ = load("dr")
        w["layers.0.ea.router.keys.weight"] = np.ones((5, 6))
        w["layers.0.ea.router.bias"] = np.array([0.0, 1, 0, 1, 1])
        _, chosen = Forward(model, w).route("layers.0.ea", np.ones((1, 1, 12)), 0, active=2)
        np.testing.assert_array_equal(chosen[0, 0], [0, 1, 0, 1, 0])


class Gradients(unittest.TestCase):
    def test_finite_differences(self):
        """Every tensor of every case along a random direction, the stopped values and the choices held still."""
        for case in CASES:
            model, weights, ids = load(case)
            weights = {name: jnp.asarray(w) for name, w in weights.items()}
            loss, rest = evaluate(model, weights, ids)
            replayed = replayed_loss(model, weights, ids, rest["stopped"])
            self.assertAlmostEqual(float(loss), float(replayed), places=13)
            rng, step = np.random.default_rng(2), 1e-5
            for name, gradient in rest["gradients"].items():
                direction = rng.standard_normal(gradient.shape)
                direction /= np.linalg.norm(direction)
                ahead, behind = (
                    float(replayed_loss(model, weights | {name: weights[name] + move * direction}, ids, rest["stopped"]))
                    for move in (step, -step)
                )
                slope = float(np.sum(gradient * direction))
                self.assertAlmostEqual((ahead - behind) / (2 * step), slope, delta=5e-9, msg=f"{case} {name}")

    def test_shared_expert_is_the_sum_of_all_experts(self):
        """`docs/dev/semantics.md` section 5: ∂W_shared = Σ_e ∂W_e."""
        model, weights, ids = load("dr_da")
        _, g = loss_and_gradients(model, weights, ids)
        for which in ("sa.qkv", "sa.out", "da.qkv", "da.out"):
            each, shared = g[f"layers.0.{which}.weight"], g[f"layers.0.{which}.shared.weight"]
            np.testing.assert_allclose(each.sum(0), shared, atol=1e-14)

    def test_biases_have_none(self):
        model, weights, ids = load("dr_da")
        _, g = loss_and_gradients(model, weights, ids)
        self.assertEqual(set(g), set(split_weights(weights)[0]))


class Properties(unittest.TestCase):
    def logits(self, model, weights, ids):
        return np.array(logits_of(model, weights, ids))

    def test_causality(self):
        """A changed token changes its own logits and none before; with the window, none far behind either."""
        for case in CASES:
            model, weights, ids = load(case)
            other = ids.copy()
            other[:, 4] = (other[:, 4] + 1) % model.vocab
            a, b = self.logits(model, weights, ids), self.logits(model, weights, other)
            np.testing.assert_array_equal(a[:, :4], b[:, :4], err_msg=case)
            self.assertTrue(np.all(np.any(a[:, 4:] != b[:, 4:], axis=-1)), case)

    def test_window_ends(self):
        model, weights, ids = load("window", body(["sa"]))
        other = ids.copy()
        other[:, 2] = (other[:, 2] + 1) % model.vocab
        changed = np.any(self.logits(model, weights, ids) != self.logits(model, weights, other), axis=(0, 2))
        np.testing.assert_array_equal(changed, [False, False, True, True, True, False, False, False])

    def test_depth_attention_sees_one_token(self):
        """With no attention over the sequence, a changed token changes its own logits alone."""
        model, weights, ids = load("dr_da", body([{"recur": 4, "layers": ["da > ea"]}]))
        other = ids.copy()
        other[:, 2] = (other[:, 2] + 1) % model.vocab
        changed = np.any(self.logits(model, weights, ids) != self.logits(model, weights, other), axis=(0, 2))
        np.testing.assert_array_equal(changed, np.arange(8) == 2)

    def test_rows_are_independent(self):
        for case in ("dr_da", "nested", "switch"):
            model, weights, ids = load(case)
            both, second = self.logits(model, weights, ids), self.logits(model, weights, ids[1:])
            np.testing.assert_allclose(both[1:], second, atol=1e-13, err_msg=case)

    def same(self, one, other, case="eq4", equal=True):
        (model, weights, ids), (second, _, _) = load(case, body(one)), load(case, body(other))
        self.assertEqual(model.shapes(), second.shapes())
        a, b = self.logits(model, weights, ids), self.logits(second, weights, ids)
        self.assertEqual(np.allclose(a, b, atol=1e-12), equal)

    def recur(self, text):
        return [{"recur": 3, "layers": [text]}]

    def test_composition_identities(self):
        self.same(self.recur("da > (sa > ea)"), self.recur("(da > sa) > ea"))
        self.same(self.recur("da > (sa > ea)"), self.recur("da > sa > ea"))
        self.same(self.recur("da | sa | ea"), self.recur("ea | (sa | da)"))
        self.same(self.recur("(da | sa) > ea"), self.recur("da > sa > ea"), equal=False)
        self.same(self.recur("da > sa"), self.recur("sa > da"), equal=False)
        # Without a residual norm between them, two layers one after the other are one layer in sequence ...
        (a, weights, ids), (b, _, _) = load("window", body(["sa", "mlp"])), load("window", body(["sa > mlp"]))
        renamed = {name.replace("layers.1.", "layers.0."): w for name, w in weights.items()}
        np.testing.assert_allclose(self.logits(a, weights, ids), self.logits(b, renamed, ids), atol=1e-12)
        # ... and a branch whose output is zero is not there.
        weights = renamed | {"layers.0.sa.out.weight": 0 * renamed["layers.0.sa.out.weight"]}
        c, _, _ = load("window", body(["mlp"]))
        np.testing.assert_allclose(self.logits(b, weights, ids), self.logits(c, weights, ids), atol=1e-12)

    def test_equation_5(self):
        """`(da | sa) > ea`, spelled out."""
        model, weights, _ = load("dr_da")
        x = np.random.default_rng(1).standard_normal((2, 3, 12))
        part = lambda name, x: Forward(model, weights).component(name, x, 0, 0)
        middle = x + part("da", x) + part("sa", x)
        got = x + Forward(model, weights).update(model.layers[0].tree, x, 0, 0)
        np.testing.assert_allclose(got, middle + part("ea", middle), atol=1e-13)

    def test_numbering(self):
        model, _, _ = load("nested")
        self.assertEqual(model.applications, [0, 1, 2, 2, 0, 1, 2, 2, 3])
        self.assertEqual([layer.times for layer in model.layers], [2, 2, 4, 1])
        self.assertEqual([layer.recurrent for layer in model.layers], [True, True, True, False])
        shapes = model.shapes()
        self.assertEqual(shapes["layers.2.da.qkv.weight"], (4, 12, 8))
        self.assertEqual(shapes["layers.3.da.qkv.weight"], (12, 8))
        self.assertIn("norm.weight", shapes)
        self.assertNotIn("norm.weight", load("dr")[0].shapes())

    def test_parse(self):
        self.assertEqual(parse("(da | sa) > ea"), (">", [("|", ["da", "sa"]), "ea"]))
        for wrong in ("a | b > c", "a >", "(a", "a b", ""):
            with self.assertRaises((AssertionError, IndexError), msg=wrong):
                parse(wrong)

    def test_unknown_keys_are_refused(self):
        with self.assertRaises(ValueError):
            load("dr", lambda model: model["components"]["ea"]["experts"].update(activ=3))


class Wiring(unittest.TestCase):
    """Streams, loops and keys of components, each against another form of the same formula."""

    def logits(self, case, edit=lambda spec: None, change=lambda weights: None):
        model, weights, ids = load(case, edit)
        change(weights)
        return np.array(logits_of(model, weights, ids))

    def same(self, a, b, equal=True):
        self.assertEqual(np.allclose(a, b, atol=1e-11), equal)

    def sum_of(self, case, change=lambda weights: None):
        """The same model with a stream that is a sum: its weights are among those of the others."""
        model, weights, ids = load(case)
        change(weights)
        plain = read_spec(text(case))["model"]
        plain.pop("stream")
        plain = Model(plain)
        return np.array(logits_of(plain, {name: weights[name] for name in plain.shapes()}, ids))

    def test_lanes_that_do_nothing_are_a_sum(self):
        """Every lane is read alone, keeps itself and takes all of the output: N equal sums, added at the end."""
        for case in ("hyper_connections_static", "hyper_connections_dynamic", "looped_lanes"):
            def neutral(weights):
                for name, w in weights.items():
                    if ".lanes" in name:
                        n = w.shape[-1]
                        if name.endswith("alpha"):
                            weights[name] = np.broadcast_to(np.eye(n)[1], w.shape)
                        elif name.endswith("beta"):
                            weights[name] = np.ones(w.shape)
                        elif name.endswith("mix"):
                            weights[name] = np.broadcast_to(np.eye(n), w.shape)
                        elif name.endswith("_scale"):
                            weights[name] = 0 * w
                weights["norm.weight"] = np.ones_like(weights["norm.weight"])

            n = load(case)[0].lanes
            # The final norm removes the factor N, but for its epsilon.
            a, b = self.logits(case, change=neutral), self.sum_of(case, neutral)
            np.testing.assert_allclose(a, b, atol=2e-5, err_msg=f"{case} {n}")

    def test_sinkhorn(self):
        m = np.random.default_rng(0).uniform(0.1, 1, (5, 3, 3))
        done = np.array(sinkhorn(m))
        np.testing.assert_allclose(done.sum(-1), 1, atol=1e-4)
        np.testing.assert_allclose(done.sum(-2), 1, atol=1e-4)
        for k in range(5):  # once more in loops
            c = m[k].copy()
            for step in range(20):
                if step:
                    for i in range(3):
                        c[i] /= c[i].sum() + 1e-6
                for j in range(3):
                    c[:, j] /= c[:, j].sum() + 1e-6
            np.testing.assert_allclose(done[k], c, atol=1e-13)

    def test_mhc_in_loops(self):
        model, w, ids = load("mhc")
        forward = Forward(model, w)
        rng, n, h = np.random.default_rng(3), 3, 8
        lanes = rng.standard_normal((1, 2, n, h))
        forward.stream, forward.depth = jnp.asarray(lanes), 0
        forward.around("mlp", 1, 0, 0)
        weight, bias, scale = (w[f"layers.0.lanes1.{name}"] for name in ("weight", "bias", "scale"))
        sigmoid = lambda v: 1 / (1 + np.exp(-v))
        for t in range(2):
            x = lanes[0, t].reshape(-1)
            z = weight @ (x / np.sqrt(np.mean(x * x) + 1e-6))
            alpha = [sigmoid(scale[0] * z[i] + bias[i]) + 1e-6 for i in range(n)]
            beta = [2 * sigmoid(scale[1] * z[n + i] + bias[n + i]) for i in range(n)]
            rows = np.exp([[scale[2] * z[2 * n + n * i + j] + bias[2 * n + n * i + j] for j in range(n)] for i in range(n)])
            mix = np.array(sinkhorn(rows / rows.sum(1, keepdims=True) + 1e-6))
            u = sum(alpha[i] * lanes[0, t, i] for i in range(n))
            y = np.array(Forward(model, w).component("mlp", u[None, None], 0, 0))[0, 0]
            for i in range(n):
                expected = sum(mix[j, i] * lanes[0, t, j] for j in range(n)) + beta[i] * y
                np.testing.assert_allclose(forward.stream[0, t, i], expected, atol=1e-12)

    def test_attention_residuals_in_loops(self):
        model, w, _ = load("attention_residuals_block")
        forward = Forward(model, w)
        values = np.random.default_rng(4).standard_normal((6, 1, 1, 8))
        # Blocks of three: the embedding, one whole block, and the two outputs since.
        sources = [values[0], values[1] + values[2] + values[3], values[4] + values[5]]
        gain, query = w["layers.1.mlp.read.norm.weight"], w["layers.1.mlp.read.weight"]
        logits = [float(query @ (v[0, 0] / np.sqrt(np.mean(v * v) + 1e-6) * gain)) for v in sources]
        p = np.exp(logits) / np.sum(np.exp(logits))
        got = forward.read([jnp.asarray(v) for v in values], "layers.1.mlp.read")
        np.testing.assert_allclose(got, sum(a * v for a, v in zip(p, sources)), atol=1e-12)

    def test_attention_with_a_zero_query_is_a_mean(self):
        def zero(weights):
            for name in weights:
                if name.endswith("read.weight"):
                    weights[name] = 0 * weights[name]
            weights["norm.weight"] = np.ones_like(weights["norm.weight"])

        # A mean and a sum of everything so far are the same to a norm.
        np.testing.assert_allclose(self.logits("attention_residuals", change=zero), self.sum_of("attention_residuals", zero), atol=1e-3)

    def test_history(self):
        def last(weights):
            for name, w in weights.items():
                if name.endswith("mix.weight"):
                    weights[name] = np.eye(len(w))[-1]

        model, weights, ids = load("denseformer")
        self.assertEqual([model.history(k) for k in range(3)], [[0], [0, 2], [0, 1, 2, 3, 4]])
        plain = Model(read_spec(text("denseformer"))["model"] | {"body": [{"repeat": 2, "layers": ["sa > mlp"] * 2}, "sa > mlp"]})
        last(weights)
        self.same(logits_of(model, weights, ids), logits_of(plain, {n: weights[n] for n in plain.shapes()}, ids))

    def test_mixes(self):
        """`add` is `linear` with [I I] and `scaled` with 1 and 1; a diagonal with no step keeps the stream."""
        h = 8
        def body(statement):
            return lambda model: model.update(body=["norm", "save e", "sa > mlp", statement, "sa > mlp"])
        def of(statement, **weights):
            model, w, _ = load("x0_scaled", body(statement))
            w |= {f"body.2.mix.{name}": value for name, value in weights.items()}
            _, shared, ids = load("x0_scaled", body("mix e add"))
            return np.array(logits_of(model, shared | {n: v for n, v in w.items() if n.startswith("body.2")}, ids))
        added = of("mix e add")
        self.same(added, of("mix e linear", weight=np.concatenate([np.eye(h), np.eye(h)], axis=1)))
        self.same(added, of("mix e scaled", **{"lambda": np.ones(1), "mu": np.ones(1)}))
        # softplus(a) = 1 and exp(A) -> 0: the stream stays, and B e is added.
        one = np.full(h, np.log(np.e - 1))
        self.same(added, of("mix e diagonal", delta=one, decay=np.full(h, -60.0), weight=np.eye(h)))
        self.same(added, of("mix e diagonal", delta=one, decay=np.zeros(h), weight=np.eye(h)), equal=False)

    def test_lora(self):
        """Without B nothing differs; with it a loop is layers whose matrices were merged."""
        model, w, ids = load("relaxed_recursive")
        unrolled = read_spec(text("relaxed_recursive"))["model"] | {"body": ["sa > mlp"] * 6}
        plain = Model(unrolled)
        merged = {}
        for name in plain.shapes():
            match = re.match(r"layers\.(\d)\.(.*)$", name)
            if not match:
                merged[name] = w[name]
                continue
            p, i, rest = int(match[1]) // 2, int(match[1]) % 2, match[2]
            merged[name] = w[f"layers.{i}.{rest}"]
            low = f"layers.{i}.{rest.removesuffix('.weight')}"
            if f"{low}.lora_a" in w:
                merged[name] = merged[name] + w[f"{low}.lora_b"][p] @ w[f"{low}.lora_a"][p]
        self.same(logits_of(model, w, ids), logits_of(plain, merged, ids))

    def test_truncated_backprop(self):
        """The gradient is that of the last passes with the state before them as a constant."""
        model, w, ids = load("looped_iso_depth")
        _, short = loss_and_gradients(model, w, ids)
        whole = read_spec(text("looped_iso_depth"))["model"]
        whole["body"][3] = {k: v for k, v in whole["body"][3].items() if k != "backprop"}
        loss, long = loss_and_gradients(Model(whole), w, ids)
        self.assertAlmostEqual(float(loss), float(loss_and_gradients(model, w, ids)[0]), places=13)
        name = "layers.1.mlp.up.weight"
        self.assertGreater(float(jnp.max(jnp.abs(short[name] - long[name]))), 1e-4)
        # The head sees the last pass alone, so nothing is cut off there.
        np.testing.assert_allclose(short["head.weight"], long["head.weight"], atol=1e-14)

    def test_exits(self):
        model, w, ids = load("ouro")
        forward = Forward(model, w)
        logits = forward.run(ids[:, :-1])
        got = float(forward.loss(logits, ids[:, 1:]))
        weight, bias, total = w["loops.0.exit.weight"], w["loops.0.exit.bias"][0], 0.0
        for b in range(2):
            for t in range(7):
                stay, q, each = 1.0, [], []
                for p in range(3):
                    leave = 1 / (1 + np.exp(-(np.array(forward.pass_streams[p][b, t]) @ weight + bias)))
                    q.append(stay if p == 2 else stay * leave)
                    stay *= 1 - leave
                    z = np.array(forward.pass_logits[p][b, t])
                    each.append(np.log(np.sum(np.exp(z))) - z[ids[b, t + 1]])
                total += sum(a * l for a, l in zip(q, each)) + 0.1 * sum(a * np.log(a) for a in q)
        self.assertAlmostEqual(got, total / 14, places=12)
        np.testing.assert_allclose(forward.pass_logits[-1], logits, atol=1e-13)

    def test_expected_logits(self):
        """The loss of the mean of all passes' logits by their shares."""
        model, w, ids = load("exit_expected")
        forward = Forward(model, w)
        logits = forward.run(ids[:, :-1])
        got, total = float(forward.loss(logits, ids[:, 1:])), 0.0
        weight, bias = w["loops.0.exit.weight"], w["loops.0.exit.bias"][0]
        for b in range(2):
            for t in range(7):
                stay, z = 1.0, np.zeros(17)
                for p in range(3):
                    leave = 1 / (1 + np.exp(-(np.array(forward.pass_streams[p][b, t]) @ weight + bias)))
                    q = stay if p == 2 else stay * leave
                    stay *= 1 - leave
                    z += q * np.array(forward.pass_logits[p][b, t])
                    total += 0.1 * q * np.log(q)
                total += np.log(np.sum(np.exp(z))) - z[ids[b, t + 1]]
        self.assertAlmostEqual(got, total / 14, places=12)

    def test_networks_of_routers(self):
        """The loss of scores, where a loop reads the embedding."""
        gelu = lambda x: 0.5 * x * (1 + math.erf(x / math.sqrt(2)))
        x = np.linspace(-4, 4, 101)
        np.testing.assert_allclose(gelu_by_error_function(x), [gelu(x) for x in x], atol=5e-7)

        def scores(w, prefix, x):
            return [w[f"{prefix}.network.down.weight"] @ [gelu(a) for a in w[f"{prefix}.network.up.weight"] @ x]]

        one = "skip(capacity 0.5, temperature 2, network 5, z_loss 0.3) { sa > mlp }"
        for case, items, prefix, cold in [
            ("choice_network", None, "loops.0.choice", 0.5), ("router_network", [one], "layers.0.skip.0", 2.0),
        ]:  # fmt: skip
            model, w, ids = load(case, lambda spec: spec.update(body=items or spec["body"][1:]))
            forward = Forward(model, w)
            forward.run(ids)
            rows = [np.concatenate([np.atleast_1d(z) for z in scores(w, prefix, w["embed.weight"][i] / cold)]) for i in ids.flat]
            loss = 0.3 * np.mean([np.log(np.sum(np.exp(z))) ** 2 for z in rows])
            np.testing.assert_allclose(forward.auxiliary, loss, rtol=1e-5)

    def test_mean_of_exits(self):
        """Fewer passes of the same loop give the logits of the earlier passes."""
        model, w, ids = load("exit_mean")
        forward = Forward(model, w)
        forward.run(ids)
        for passes in (1, 2):
            shorter = read_spec(text("exit_mean"))["model"]
            shorter["body"][1]["recur"] = passes
            fewer = w | {"loops.0.embed.weight": w["loops.0.embed.weight"][:passes]}
            self.same(Forward(Model(shorter), fewer).run(ids), forward.pass_logits[passes - 1])

    def test_first_keys(self):
        """`kv first` with one pass is no change, with two it is."""
        def loop(passes, **settings):
            return lambda model: model.update(body=[{"recur": passes, "residual_norm": False, "layers": ["sa > mlp"], **settings}])
        self.same(self.logits("exit_mean", loop(1)), self.logits("exit_mean", loop(1, kv="first")))
        self.same(self.logits("exit_mean", loop(2)), self.logits("exit_mean", loop(2, kv="first")), equal=False)

    def test_recursions(self):
        """Nested: who takes part in a pass took part in the one before, and so many of them as the capacity says."""
        model, w, ids = load("mixture_of_recursions")
        forward, seen = Forward(model, w), []
        original = forward.update
        def watch(tree, x, l, i):
            if forward.taking is not None:
                seen.append((forward.passes[-1], np.array(forward.taking)))
            return original(tree, x, l, i)
        forward.update = watch
        forward.run(ids[:, :-1])
        by_pass = {p: taking for p, taking in seen}
        for p, k in enumerate((7, 4, 2)):
            np.testing.assert_array_equal(by_pass[p].sum(-1), k)
            if p:
                self.assertTrue(np.all(by_pass[p] <= by_pass[p - 1]))

    def test_depth_choice(self):
        """A token that chose one pass is the same as without the loop's other passes."""
        model, w, ids = load("mixture_of_recursions_token")
        w["loops.0.choice.bias"] = np.array([100.0, 0, 0])
        got = Forward(model, w).run(ids)
        x = jnp.asarray(w["embed.weight"])[ids]
        x = x + Forward(model, w).update(model.layers[0].tree, x, 0, 0)
        gate = jax.nn.softmax(x @ w["loops.0.choice.weight"].T, axis=-1)[..., :1]
        x = x + gate * (x + Forward(model, w).update((">", ["sa", "mlp"]), x, 1, 1))
        x = x + Forward(model, w).update(model.layers[2].tree, x, 2, 2)
        self.same(got, Forward(model, w).head(x))

    def test_keys_of_components(self):
        # A value residual of 1 is none, and so is a gate that is open everywhere, up to its factor.
        def plain(case, changed):
            model, w, ids = load(case)
            for name, value in changed(w).items():
                w[name] = value
            bare = read_spec(text(case))["model"]
            for c in bare["components"].values():
                for key in ("value_residual", "depth_keys", "gate", "sink", "bias"):
                    next(iter(c.values())).pop(key, None)
            bare = Model(bare)
            return np.array(logits_of(model, w, ids)), np.array(logits_of(bare, {n: w[n] for n in bare.shapes()}, ids))
        self.same(*plain("value_residual", lambda w: {n: np.ones(1) for n in w if n.endswith("value_residual")}))
        self.same(*plain("value_residual", lambda w: {}), equal=False)
        closed = lambda w: {n: (np.full(v.shape, -60.0) if n.endswith("sink") else 0 * v) for n, v in w.items() if n.endswith(("sink", "qkv.bias", "out.bias"))}
        self.same(*plain("attention_sink", closed))
        self.same(*plain("attention_sink", lambda w: {}), equal=False)
        self.same(*plain("moda", lambda w: {}), equal=False)

    def test_sink_in_loops(self):
        model, w, _ = load("attention_sink")
        x = np.random.default_rng(5).standard_normal((1, 1, 8))
        # One token sees itself alone: its share is exp(s) / (exp(s) + exp(sink)).
        prefix = "layers.1.sa"
        qkv = w[f"{prefix}.qkv.weight"] @ x[0, 0] + w[f"{prefix}.qkv.bias"]
        k, v = qkv[8:12], qkv[12:16]
        gain = lambda u, name: u / np.sqrt(np.mean(u * u) + 1e-6) * w[f"{prefix}.{name}.weight"]
        heads = []
        for head in range(2):
            s = gain(qkv[4 * head : 4 * head + 4], "q_norm") @ gain(k, "k_norm") / 2
            heads.append(v / (1 + np.exp(w[f"{prefix}.sink"][head] - s)))
        got = Forward(model, w).attention("sa", model.components["sa"], prefix, jnp.asarray(x), 0, model.layers[1])
        np.testing.assert_allclose(got[0, 0], w[f"{prefix}.out.weight"] @ np.concatenate(heads), atol=1e-12)

    def test_depth_keys(self):
        """With one token the sequence is that token, so what is left is attention over its own earlier keys."""
        model, w, ids = load("moda")
        as_depth = read_spec(text("moda"))["model"]
        as_depth["components"]["sa"] = {"depth": {"heads": 2, "kv_heads": 1, "head_size": 4, "rope": 1e300}}
        one = ids[:, :1]
        # Rotations of one token cancel; depth's, with an endless base, turn only the first pair, so both are left out.
        model.components["sa"]["rope"]["share"] = 0.0
        depth = Model(as_depth)
        depth.components["sa"]["rope"]["share"] = 0.0
        self.same(Forward(model, w).run(one), Forward(depth, w).run(one))

    def test_depth_stream(self):
        """Keys that are neither normed nor turned are the same in the stream and in the component's own row."""
        model, w, ids = load("depth_heads")
        w = w | {name: np.zeros_like(value) for name, value in w.items() if name.endswith("_norm.weight")}
        plain = read_spec(text("depth_heads"))["model"]
        plain["components"]["sa"]["sequence"] |= {"depth_stream": None, "depth_keys": True, "qk_norm": "none"}
        plain["components"]["mlp"]["mlp"]["depth_stream"] = False
        plain = Model(plain)
        model.components["sa"]["qk_norm"] = "none"
        for each in (model, plain):
            each.components["sa"]["rope"]["share"] = 0.0
        got = Forward(model, w).run(ids)
        self.assertGreater(float(np.max(np.abs(got - Forward(plain, w).run(ids)))), 1e-3)
        model.components["mlp"]["depth_stream"] = False
        self.same(Forward(model, w).run(ids), Forward(plain, w).run(ids))

    def test_shared_keys(self):
        """Attention that reads its own keys again is attention."""
        model, w, ids = load("cross_layer_kv")
        forward = Forward(model, w)
        forward.run(ids)
        k, v = forward.latest["sa"]
        self.assertEqual(k.shape, (2, 8, 1, 4))
        self.assertNotIn("again", forward.latest)
        self.assertEqual(w["layers.1.again.qkv.weight"].shape, (8, 8))

    def test_groups(self):
        model, w, _ = load("shared_experts")
        c, prefix = model.components["ea"], "layers.0.ea"
        x = np.random.default_rng(6).standard_normal((1, 5, 8))
        forward = Forward(model, w)
        score, chosen = forward.route(prefix, jnp.asarray(x), 0, 2, c["router"])
        for t in range(5):
            z = w[f"{prefix}.router.weight"] @ x[0, t]
            s = np.sqrt(np.log1p(np.exp(z)))
            ranked = s + w[f"{prefix}.router.bias"]
            groups = sorted(range(4), key=lambda g: -sum(sorted(ranked[2 * g : 2 * g + 2])[-2:]))[:2]
            allowed = [e for e in range(8) if e // 2 in groups]
            best = sorted(allowed, key=lambda e: -ranked[e])[:2]
            self.assertEqual(set(np.flatnonzero(np.array(chosen[0, t]))), set(best))
            np.testing.assert_allclose(score[0, t], s, atol=1e-13)

    def test_rotations(self):
        x = np.random.default_rng(7).standard_normal((3, 8))
        at = np.arange(3.0)[:, None] * np.ones(4)
        half = rotate(x, at, 10000, share=0.5)
        np.testing.assert_array_equal(half[:, 4:], x[:, 4:])
        np.testing.assert_allclose(half[:, :4], rotate(x[:, :4], at[:, :2], 10000), atol=1e-14)
        linear = rotate(x, at, 10000, scaling={"type": "linear", "factor": 4})
        np.testing.assert_allclose(linear, rotate(x, at / 4, 10000), atol=1e-14)
        # Factors of transformers' yarn for a head of 64, base 10000, factor 4, original context 4096, worked out by hand: the
        # ramp runs from pair 10 (32 turns) to pair 23 (one turn).
        frequencies, factor = scaled_frequencies(10000, 64, {"type": "yarn", "factor": 4, "original_context": 4096})
        plain = 10000.0 ** (-2 * np.arange(32) / 64)
        np.testing.assert_allclose(frequencies[:11], plain[:11])
        np.testing.assert_allclose(frequencies[23:], plain[23:] / 4)
        np.testing.assert_allclose(frequencies[16] / plain[16], 1 - 6 / 13 * 0.75)
        self.assertAlmostEqual(factor, 0.1 * np.log(4) + 1)

    def test_final_norms(self):
        for case, expected in dict(huginn=True, ouro=False, exit_mean=False, parcae=True, universal_transformer=True).items():
            self.assertEqual(load(case)[0].final_norm, expected, case)


class Training(unittest.TestCase):
    SETTINGS = dict(learning_rate=0.1, warmup=2, clip=1e9, weight_decay=0.5, eps=1e-8)

    def test_first_step(self):
        """Adam's first step is the sign of the gradient; matrices shrink as well, the embedding and gains do not."""
        model, weights, ids = load("dr")
        _, g = loss_and_gradients(model, weights, ids)
        _, after, _ = train(model, weights, [ids], self.SETTINGS)
        for name, gradient in g.items():
            moved = (after[name] - weights[name]) / 0.05  # half the learning rate: the first of two warm-up steps
            decay = 0.5 * weights[name] if weights[name].ndim > 1 and name != "embed.weight" else 0
            clear = np.abs(gradient) > 1e-4
            np.testing.assert_allclose((moved + decay)[clear], -np.sign(gradient)[clear], atol=2e-4, err_msg=name)

    def test_balancing(self):
        model, weights, ids = load("dr")
        _, rest = evaluate(model, weights, ids)
        _, after, _ = train(model, weights, [ids], self.SETTINGS)
        for name, rate in [("layers.0.ea.router.bias", 1e-3), ("layers.0.sa.router.bias", 1e-2)]:
            counts = np.array(rest["counts"][name])
            self.assertEqual(counts.sum(), 2 * 7 * 4 * (2 if "ea" in name else 1))  # rows, tokens, depths, choices
            middle = np.sort(counts)
            middle = (middle[(len(middle) - 1) // 2] + middle[len(middle) // 2]) / 2
            for e, n in enumerate(counts):
                expected = rate if n < middle else -rate if n > middle else 0
                self.assertAlmostEqual(after[name][e] - weights[name][e], expected, places=14)

    def test_clipping(self):
        """Without a second moment to divide it out, clipping shows: with a huge eps the step is g · clip / norm / eps."""
        model, weights, ids = load("la")
        _, g = loss_and_gradients(model, weights, ids)
        norm = np.sqrt(sum(float(jnp.sum(each * each)) for each in g.values()))
        settings = dict(learning_rate=1e6, warmup=1, clip=norm / 3, weight_decay=0.0, eps=1e9)
        _, after, _ = train(model, weights, [ids], settings)
        for name in g:
            np.testing.assert_allclose(weights[name] - after[name], g[name] / 3 / 1e3, rtol=1e-6, atol=1e-14)


class ResidualTwice(Forward):
    def gated(self, r, member, x, f):
        return x + r[..., None] * f


class ScoreTimesResidual(Forward):
    def gated(self, r, member, x, f):
        return r[..., None] * (x + f) - x


class SoftmaxOverTheSelected(Forward):
    def gated(self, r, member, x, f):
        return jax.nn.softmax(jnp.where(member > 0, r, -jnp.inf), axis=-1)[..., None] * f


class OneFewer(Forward):
    def room(self, capacity, t):
        return super().room(capacity, t) - 1


class Renumbered(Forward):
    def positions(self, b, t):
        return super().positions(b, t) if self.taking is None else jnp.cumsum(self.taking, axis=-1) - 1.0


class StaleZeros(Forward):
    def are_keys(self):
        return jnp.ones_like(self.taking)


class TopKAtDecode(Forward):
    top_k_always = True


class KnownMistakes(unittest.TestCase):
    """Public code of Mixture-of-Depths computes other functions; the golden files tell each of them from the right one."""

    def logits(self, kind, case, inference):
        golden = load_file(FOLDER / f"{case}.safetensors")
        weights = {n.removeprefix("weights."): w for n, w in golden.items() if n.startswith("weights.")}
        model = Model(read_spec(CASES[case])["model"])
        forward = kind(model, weights, inference=inference)
        found = forward.run(golden["ids"][:, :-1])
        return float(np.max(np.abs(found - golden["inference.logits" if inference else "logits"])))

    def test_each_is_noticed(self):
        for case in ("mod", "mod_recur"):
            for inference in (False, True):
                self.assertLess(self.logits(Forward, case, inference), 1e-10)
            for kind in (ResidualTwice, ScoreTimesResidual, SoftmaxOverTheSelected, OneFewer, Renumbered, StaleZeros):
                with self.subTest(case=case, mistake=kind.__name__):
                    self.assertGreater(self.logits(kind, case, inference=False), 1e-3)
            self.assertGreater(self.logits(TopKAtDecode, case, inference=True), 1e-3)


if __name__ == "__main__":
    unittest.main()
