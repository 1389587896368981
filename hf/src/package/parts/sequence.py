class SequenceAttention(Attention):
    """Causal attention over the tokens of a text."""

    slots = 1

    def __init__(self, config, name, times):  #? kv_from
        super().__init__(config, name, times)  #? kv_from
        self.slots = 0 if self.c["kv_from"] else 1  #? kv_from
#? kv_from
    def forward(self, x, at):
        q, k, v, choice, left = self.project(x, at)  #? depth_stream
        q, k, v, choice = self.project(x, at)  #? !depth_stream
        if self.value_residual is not None:  #? value_residual
            first = at.first_values.setdefault(self.name, v)  #? value_residual
            v = self.value_residual * v + (1.0 - self.value_residual) * first  #? value_residual
        if self.c["rope"]:  #? sequence_rope
            size = self.c["head_size"]  #? sequence_rope&!latent
            size = self.c["latent"]["turned"] if self.c["latent"] else self.c["head_size"]  #? sequence_rope&latent
            turns = frequencies(size, self.c["rope"], x.device)  #? sequence_rope&!latent_pairs
            turns = chosen_turns(self.c, size, x.device)  #? sequence_rope&latent_pairs
            angles = at.positions[..., None, None] * turns  #? sequence_rope
            # Latent heads turn at their end.  #? sequence_rope&latent
            (still, q), (fixed, k) = (x.split([x.shape[-1] - size, size], -1) for x in (q, k))  #? sequence_rope&latent
            q, k = rotate(q, angles, self.c["rope"]), rotate(k, angles, self.c["rope"])  #? sequence_rope
            q, k = torch.cat([still, q], -1), torch.cat([fixed, k], -1)  #? sequence_rope&latent
        q = q.transpose(1, 2)
        # Keys and values of its own, or those that another component made last.  #? kv_from
        source = self.c["kv_from"]  #? kv_from
        k, v = at.made[source] if source else at.update(k.transpose(1, 2), v.transpose(1, 2))  #? kv_from&!kv_first
        k, v, seen = (*at.made[source], None) if source else at.shared(k.transpose(1, 2), v.transpose(1, 2))  #? kv_from&kv_first
        at.made[self.name] = k, v  #? kv_from
        k, v = at.update(k.transpose(1, 2), v.transpose(1, 2))  #? !kv_from&!kv_first
        k, v, seen = at.shared(k.transpose(1, 2), v.transpose(1, 2))  #? !kv_from&kv_first
        groups = self.c["heads"] // self.c["kv_heads"]  #? groups
        k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)  #? groups
        visible = at.visible
        if self.c["window"]:  #? window
            visible = visible & (at.back < self.c["window"])  #? window
        if at.seen is not None:  #? skip&!kv_first
            visible = visible & at.seen[:, None]  #? skip&!kv_first
        if seen is not None:  #? skip&kv_first
            visible = visible & seen[:, None]  #? skip&kv_first
        scores, visible = q @ k.transpose(-1, -2), visible[:, None]
        t, s = scores.shape[-2:]  #? depth_keys
        # What earlier applications made of the same token stands in the same softmax.  #? depth_keys
        earlier = at.same_token.setdefault(self.name, []) if self.c["depth_keys"] else []  #? depth_keys
        if self.c["depth_stream"]:  #? depth_stream
            earlier = self.above(at)  #? depth_stream
            at.depth_stream.append(left)  #? depth_stream
        scores = torch.cat([scores] + [(q * key).sum(-1, keepdim=True) for key, _ in earlier], -1)  #? depth_keys
        visible = F.pad(visible, (0, len(earlier)), value=True)  #? depth_keys
        p = self.weigh(scores, visible).to(v.dtype)
        mixed = p[..., :s] @ v + sum(p[..., s + l, None] * value for l, (_, value) in enumerate(earlier))  #? depth_keys
        earlier.append((k[:, :, s - t :], v[:, :, s - t :]))  #? depth_keys
        mixed = p @ v  #? !depth_keys
        return self.finish(mixed.transpose(1, 2), choice, at)  #? lora
        return self.finish(mixed.transpose(1, 2), choice)  #? !lora
