class Experts(nn.Module):
    """A mixture of networks; each token uses some."""

    slots = 0

    def __init__(self, config, name):
        super().__init__()
        c, h = config.components[name], config.hidden_size
        self.count, self.active, self.activation = c["count"], c["active"], c["activation"]
        self.norm = Norm(h) if c["pre_norm"] else nn.Identity()  #? raw
        self.norm = Norm(h)  #? !raw
        # Choices from `count` on are experts that return nothing.  #? noop
        self.router = Router(h, c["count"] + c["noop"], c["router"])
        self.gate = Matrix(c["count"], c["intermediate"], h) if c["gated"] else None
        self.up, self.down = Matrix(c["count"], c["intermediate"], h), Matrix(c["count"], h, c["intermediate"])
        if c["biased"]:  #? biased
            self.router.logit_bias = nn.Parameter(torch.zeros(c["count"] + c["noop"]))  #? biased
            for matrix in (self.gate, self.up, self.down):  #? biased
                if matrix is not None:  #? biased
                    matrix.bias = nn.Parameter(torch.zeros(matrix.weight.shape[:2]))  #? biased
        self.shared = Shared(c, h) if c["shared"] else None  #? always
        self.shared_gate = Matrix(h) if c["shared_gate"] else None  #? always
        # Keys and values that it leaves in the depth stream.  #? network_left
        left, biased = c["depth_stream"], False  #? network_left
        self.depth_kv = Left(*left, h, biased) if left else None  #? network_left
        self.post_norm = Norm(h) if c["post_norm"] else nn.Identity()  #? post_norm

    def product(self, matrix, x, e):
        bias = getattr(matrix, "bias", None)  #? biased
        return F.linear(x, matrix.weight[e], None if bias is None else bias[e])  #? biased
        return F.linear(x, matrix.weight[e])  #? !biased

    def forward(self, x, at):
        x = self.norm(x)
        if self.depth_kv is not None:  #? network_left
            at.depth_stream.append(self.depth_kv(x))  #? network_left
        chosen, gates = self.router(x, self.active, at)
        chosen, gates, flat = chosen.flatten(0, 1), gates.flatten(0, 1), x.flatten(0, 1)
        y = torch.zeros_like(flat)
        for e in chosen.unique().tolist():
            if e >= self.count:  #? noop
                continue  #? noop
            rows, place = (chosen == e).nonzero(as_tuple=True)
            gate = None if self.gate is None else self.product(self.gate, flat[rows], e)
            inner = activate(self.activation, gate, self.product(self.up, flat[rows], e))
            y.index_add_(0, rows, gates[rows, place, None] * self.product(self.down, inner, e))
        y = y.view_as(x)
        if self.shared is not None:  #? always
            always = self.shared(x)  #? always
            if self.shared_gate is not None:  #? always
                always = always * (x @ self.shared_gate.weight).sigmoid()[..., None]  #? always
            y = y + always  #? always
        y = self.post_norm(y)  #? post_norm
        return @OUTPUT_SCALE@ * y  #? output_scale
        return y  #? !output_scale
