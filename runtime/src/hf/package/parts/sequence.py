class SequenceAttention(Attention):
    """Causal attention over the tokens of a text."""

    slots = 1

    def forward(self, x, at):
        q, k, v, choice = self.project(x, at)
        if self.c["rope"]:  #? sequence_rope
            turns = frequencies(self.c["head_size"], self.c["rope"], x.device)  #? sequence_rope
            angles = at.positions[..., None, None] * turns  #? sequence_rope
            q, k = rotate(q, angles, self.c["rope"]), rotate(k, angles, self.c["rope"])  #? sequence_rope
        q = q.transpose(1, 2)
        k, v = at.update(k.transpose(1, 2), v.transpose(1, 2))
        groups = self.c["heads"] // self.c["kv_heads"]  #? groups
        k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)  #? groups
        visible = at.visible
        if self.c["window"]:  #? window
            visible = visible & (at.back < self.c["window"])  #? window
        if at.seen is not None:  #? skip
            visible = visible & at.seen[:, None]  #? skip
        p = self.weigh(q @ k.transpose(-1, -2), visible[:, None])
        return self.finish((p.to(v.dtype) @ v).transpose(1, 2), choice)
