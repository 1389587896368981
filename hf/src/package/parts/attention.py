class Attention(nn.Module):
    """What attentions over the sequence and over depth have in common: `[b, t, heads, d]` from the stream, and back."""  #? sequence&depth
    """`[b, t, heads, d]` from the stream, and back."""  #? !both

    matrices = "qkv", "out", "gate"  #? lora

    def __init__(self, config, name, times):
        super().__init__()
        c, h = config.components[name], config.hidden_size
        self.name, self.c = name, c
        d, heads, kv = c["head_size"], c["heads"], c["kv_heads"]
        kv = 0 if c["kv_from"] else kv  # none of its own  #? kv_from
        self.norm = Norm(h) if c["pre_norm"] else nn.Identity()  #? raw
        self.norm = Norm(h)  #? !raw
        rows = (heads + 2 * kv) * d
        if times and c["projection"]:  #? projection
            # One expert for each of the applications that the model was trained with.  #? projection
            p = c["projection"]  #? projection
            experts = p["count"] or times  #? projection
            self.router = Router(h, experts, p["router"])  #? projection
            self.qkv = ProjectionMixture(experts, rows, h, p["shared"])  #? projection
            self.out = ProjectionMixture(experts, h, heads * d, p["shared"])  #? projection
        else:  #? projection
            self.router = None  #? projection
            self.qkv, self.out = Projection(rows, h), Projection(h, heads * d)  #? projection&plain_projection
        self.qkv, self.out = Projection(rows, h), Projection(h, heads * d)  #? !projection
        if c["latent"]:  #? latent
            make_latent(self, c, h)  #? latent
        if c["bias"] in ("qkv", "all"):  #? bias
            self.qkv.bias = nn.Parameter(torch.zeros(rows))  #? bias
        if c["bias"] in ("out", "all"):  #? bias
            self.out.bias = nn.Parameter(torch.zeros(h))  #? bias
        if c["bias"] == "qk":  #? qk_bias
            self.q, self.k = nn.Module(), nn.Module()  #? qk_bias
            self.q.bias = nn.Parameter(torch.zeros(heads * d))  #? qk_bias
            self.k.bias = nn.Parameter(torch.zeros(kv * d))  #? qk_bias&!kv_from
            self.k.bias = nn.Parameter(torch.zeros(kv * d)) if kv else 0  #? qk_bias&kv_from
        # What it leaves in the depth stream, where that is not its own keys and values.  #? depth_own
        own = c["depth_stream"] == "own"  #? depth_own
        self.depth_kv = Left(kv, d, h, c["bias"] in ("qkv", "all")) if own else None  #? depth_own
        gates = {"head": heads, "element": heads * d}  #? gate
        self.gate = Matrix(gates[c["gate"]], h) if c["gate"] else None  #? gate
        # A logit of each head that stands for nothing.  #? sink
        self.sink = nn.Parameter(torch.zeros(heads)) if c["sink"] else None  #? sink
        if c["qk_norm"] != "none":  #? qk_norm
            all_heads = c["qk_norm"] == "rms_all"  #? qk_norm
            self.q_norm = Norm(heads * d if all_heads else d)  #? qk_norm
            self.k_norm = Norm(kv * d if all_heads else d)  #? qk_norm&!kv_from
            self.k_norm = Norm(kv * d if all_heads else d) if kv else nn.Identity()  #? qk_norm&kv_from
        # The share of its own values next to that of the component's first application.  #? value_residual
        self.value_residual = nn.Parameter(torch.full((1,), 0.5)) if c["value_residual"] else None  #? value_residual
        self.post_norm = Norm(h) if c["post_norm"] else nn.Identity()  #? post_norm
        self.scale = c["scale"] or 1.0 / math.sqrt(d)

    def project(self, x, at):
        """Queries, keys and values, not rotated yet, and the choice that both projections share."""
        c, x = self.c, self.norm(x)
        b, t, _ = x.shape
        choice = self.router(x, 1, at) if self.router is not None else None  #? projection
        choice = None  #? !projection
        d, heads, kv = c["head_size"], c["heads"], c["kv_heads"]
        if c["latent"]:  #? latent
            return *latent(self, x), (None, None), None  #? latent&gate&depth_stream
            return *latent(self, x), None, None  #? latent&!gate&depth_stream
            return *latent(self, x), (None, None)  #? latent&gate&!depth_stream
            return *latent(self, x), None  #? latent&!gate&!depth_stream
        kv = 0 if c["kv_from"] else kv  #? kv_from
        q, k, v = self.qkv(x, choice, at).split([heads * d, kv * d, kv * d], -1)  #? lora
        q, k, v = self.qkv(x, choice).split([heads * d, kv * d, kv * d], -1)  #? !lora
        if c["bias"] == "qk":  #? qk_bias
            q, k = q + self.q.bias, k + self.k.bias  #? qk_bias
        left = k, v  #? depth_stream
        if c["qk_norm"] == "rms_all":  #? qk_all
            q, k = self.q_norm(q), self.k_norm(k)  #? qk_all
        q, k, v = q.view(b, t, heads, d), k.view(b, t, kv, d), v.view(b, t, kv, d)
        if c["qk_norm"] == "rms":  #? qk_rms
            q, k = self.q_norm(q), self.k_norm(k)  #? qk_rms
        share = None if self.gate is None else F.linear(x, self.gate.weight).sigmoid().view(b, t, heads, -1)  #? gate&!lora
        share = None if self.gate is None else linear(x, self.gate, at).sigmoid().view(b, t, heads, -1)  #? gate&lora
        if c["depth_stream"] == "own":  #? depth_own
            left = self.depth_kv(x)  #? depth_own
        return q, k, v, (choice, share), left  #? gate&depth_stream
        return q, k, v, choice, left  #? !gate&depth_stream
        return q, k, v, (choice, share)  #? gate&!depth_stream
        return q, k, v, choice  #? !gate&!depth_stream

    def above(self, at):  #? depth_stream
        """Keys and values `[b, heads, t, d]` of the depth stream so far, with the norm of this component."""  #? depth_stream
        found, groups = [], self.c["heads"] // self.c["kv_heads"]  #? depth_stream
        for k, v in at.depth_stream:  #? depth_stream
            k, v = (y.unflatten(-1, (self.c["kv_heads"], self.c["head_size"])) for y in (k, v))  #? depth_stream
            if self.c["qk_norm"] == "rms":  #? depth_stream&qk_rms
                k = self.k_norm(k)  #? depth_stream&qk_rms
            found.append([y.transpose(1, 2).repeat_interleave(groups, 1) for y in (k, v)])  #? depth_stream
        return found  #? depth_stream
#? depth_stream
    def weigh(self, scores, visible):
        """Probabilities of what is visible; of nothing, where nothing is."""
        scores = scores.float() * self.scale
        cap = self.c["softcap"]  #? softcap
        if cap:  #? softcap
            scores = cap * torch.tanh(scores / cap)  #? softcap
        hidden = torch.finfo(scores.dtype).min
        scores = scores.masked_fill(~visible, hidden)  #? sink
        if self.sink is not None:  #? sink
            sink = self.sink.float()[:, None, None].expand(*scores.shape[:-1], 1)  #? sink
            return torch.cat([scores, sink], -1).softmax(-1)[..., :-1] * visible  #? sink
        return scores.softmax(-1) * visible  #? sink
        return scores.masked_fill(~visible, hidden).softmax(-1) * visible  #? !sink

    def finish(self, mixed, choice, at):  #? lora
    def finish(self, mixed, choice):  #? !lora
        """Heads `[b, t, heads, d]` back to the stream."""
        choice, share = choice  #? gate
        if share is not None:  #? gate
            mixed = mixed * share  #? gate
        y = self.out(mixed.flatten(2), choice, at)  #? lora
        y = self.out(mixed.flatten(2), choice)  #? !lora
        y = self.post_norm(y)  #? post_norm
        return @OUTPUT_SCALE@ * y  #? output_scale
        return y  #? !output_scale
