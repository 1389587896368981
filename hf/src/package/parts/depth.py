class DepthAttention(Attention):
    """Attention over what this component read at earlier depths, for each token by itself; nothing of it is cached."""

    slots = 0

    def forward(self, x, at):
        q, k, v, choice, _ = self.project(x, at)  #? depth_stream
        q, k, v, choice = self.project(x, at)  #? !depth_stream
        if self.c["rope"]:  #? depth_rope
            angles = depth_angles(self.c["head_size"], self.c["rope"], at, x.device)  #? depth_rope
            q, k = rotate(q, angles, self.c["rope"]), rotate(k, angles, self.c["rope"])  #? depth_rope
        earlier = at.earlier.setdefault(self.name, [])
        earlier.append((k, v, at.keys))  #? skip
        earlier.append((k, v))  #? !skip
        k, v = (torch.stack([e[i] for e in earlier], 3) for i in (0, 1))  # [b, t, kv_heads, depth, d]
        groups = self.c["heads"] // self.c["kv_heads"]  #? groups
        k, v = k.repeat_interleave(groups, 2), v.repeat_interleave(groups, 2)  #? groups
        scores = (k @ q[..., None]).squeeze(-1)
        visible = torch.stack([e[2] for e in earlier], -1)[:, :, None]  #? skip
        visible = torch.ones_like(scores, dtype=torch.bool)  #? !skip
        p = self.weigh(scores, visible)
        mixed = (p.to(v.dtype)[..., None, :] @ v).squeeze(-2)
        return self.finish(mixed, choice, at)  #? lora
        return self.finish(mixed, choice)  #? !lora
