"""dreamc's models in lm-evaluation-harness: `python -m dreamc.lm_eval --model dreamc --model_args path=RUN`.

The harness has no entry points for models of other packages: whoever imports this module has registered them.
"""

from __future__ import annotations

import numpy as np
from lm_eval.api.model import LM
from lm_eval.api.registry import register_model

from . import load


def _log_softmax(logits):
    shifted = logits.astype(np.float64) - logits.max(axis=-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True))


@register_model("dreamc")
class DreamcLM(LM):
    """A run, a checkpoint or an import."""

    def __init__(self, path, device="cpu", threads=None, depth=None, batch_size=8, max_gen_toks=256, **_):
        super().__init__()
        number = lambda x: None if x in (None, "", "None") else int(x)
        self.model = load(path, device=device or "cpu", threads=number(threads), depth=number(depth))
        self.rows = number(batch_size) or 8
        self.max_tokens = int(max_gen_toks)

    def _scores(self, texts):
        """For each (context, continuation): log-probability in nats, and whether it is the greedy one."""
        context = self.model.context
        order = sorted(range(len(texts)), key=lambda i: -len(texts[i][0]) - len(texts[i][1]))
        found = [None] * len(texts)
        for at in range(0, len(order), self.rows):
            chunk = order[at : at + self.rows]
            rows = [(texts[i][0] + texts[i][1])[-(context + 1) :] for i in chunk]
            # Few lengths, since a program is compiled for each.
            length = min(context, -(-max(len(row) - 1 for row in rows) // 64) * 64)
            ids = [row[:-1] + [0] * (length - len(row) + 1) for row in rows]
            ids += [[0] * length] * (self.rows - len(ids))
            scores = _log_softmax(self.model.logits(ids)[: len(chunk)])
            for k, i in enumerate(chunk):
                targets = rows[k][1:][-len(texts[i][1]) :]
                places = np.arange(len(rows[k]) - 1 - len(targets), len(rows[k]) - 1)
                chosen = scores[k, places]
                sum_ = float(chosen[np.arange(len(targets)), targets].sum())
                found[i] = (sum_, bool((chosen.argmax(axis=-1) == targets).all()))
        return found

    def _pair(self, context, continuation):
        """Both encoded together, as the harness does: spaces that end the context are the continuation's."""
        bare = context.rstrip()
        continuation = context[len(bare) :] + continuation
        if not bare:
            ids = self.model.tokenize(continuation)
            begin = self.model.tokenize("")
            return (begin or [self.model.end_token], ids[len(begin) :])
        whole, head = self.model.tokenize(bare + continuation), self.model.tokenize(bare)
        return whole[: len(head)], whole[len(head) :]

    def loglikelihood(self, requests):
        return self._scores([self._pair(*request.args) for request in requests])

    def loglikelihood_rolling(self, requests):
        found = []
        for request in requests:
            (text,) = request.args
            begin = self.model.tokenize("") or [self.model.end_token]
            ids = self.model.tokenize(text, begin=False)
            context = self.model.context
            # Windows side by side; each later one reads as much before it as fits, one token at the least.
            windows, at = [], 0
            while at < len(ids):
                take = ids[at : at + context]
                before = begin[-1:] if at == 0 else ids[at - 1 : at]
                windows.append((before, take))
                at += len(take)
            found.append(sum(score for score, _ in self._scores(windows)))
        return found

    def generate_until(self, requests):
        written = []
        for request in requests:
            prompt, settings = request.args
            until = settings.get("until") or []
            stop = [until] if isinstance(until, str) else list(until)
            sample = settings.get("do_sample", settings.get("temperature", 0) > 0)
            written.append(
                self.model.generate(
                    prompt,
                    max_tokens=int(settings.get("max_gen_toks", self.max_tokens)),
                    temperature=float(settings.get("temperature", 0.0)) if sample else 0.0,
                    top_p=settings.get("top_p"),
                    stop=[s for s in stop if s],
                )
            )
        return written


if __name__ == "__main__":
    import sys

    from lm_eval.__main__ import cli_evaluate

    # The harness's own default is a GPU, dreamc's the CPU.
    if "--model" in sys.argv and "--device" not in sys.argv:
        sys.argv += ["--device", "cpu"]
    cli_evaluate()
