class Mlp(nn.Module):
    """One dense network."""

    slots = 0
    matrices = "gate", "up", "down"  #? lora

    def __init__(self, config, name):
        super().__init__()
        c, h = config.components[name], config.hidden_size
        self.activation = c["activation"]
        self.norm = Norm(h) if c["pre_norm"] else nn.Identity()  #? raw
        self.norm = Norm(h)  #? !raw
        self.gate = Matrix(c["intermediate"], h) if c["gated"] else None
        self.up, self.down = Matrix(c["intermediate"], h), Matrix(h, c["intermediate"])
        if c["biased"]:  #? biased_mlp
            for matrix in (self.gate, self.up, self.down):  #? biased_mlp
                if matrix is not None:  #? biased_mlp
                    matrix.bias = nn.Parameter(torch.zeros(matrix.weight.shape[0]))  #? biased_mlp
        # Keys and values that it leaves in the depth stream.  #? network_left
        left, biased = c["depth_stream"], c["biased"]  #? network_left
        self.depth_kv = Left(*left, h, biased) if left else None  #? network_left
        self.post_norm = Norm(h) if c["post_norm"] else nn.Identity()  #? post_norm

    def product(self, matrix, x, at):  #? biased_mlp
        y = linear(x, matrix, at)  #? biased_mlp&lora
        y = F.linear(x, matrix.weight)  #? biased_mlp&!lora
        return y if getattr(matrix, "bias", None) is None else y + matrix.bias  #? biased_mlp

    def forward(self, x, at):
        x = self.norm(x)
        if self.depth_kv is not None:  #? network_left
            at.depth_stream.append(self.depth_kv(x))  #? network_left
        gate = None if self.gate is None else self.product(self.gate, x, at)  #? biased_mlp
        inner = activate(self.activation, gate, self.product(self.up, x, at))  #? biased_mlp
        y = self.product(self.down, inner, at)  #? biased_mlp
        gate = None if self.gate is None else linear(x, self.gate, at)  #? lora&!biased_mlp
        y = linear(activate(self.activation, gate, linear(x, self.up, at)), self.down, at)  #? lora&!biased_mlp
        gate = None if self.gate is None else F.linear(x, self.gate.weight)  #? !lora&!biased_mlp
        y = F.linear(activate(self.activation, gate, F.linear(x, self.up.weight)), self.down.weight)  #? !lora&!biased_mlp
        y = self.post_norm(y)  #? post_norm
        return @OUTPUT_SCALE@ * y  #? output_scale
        return y  #? !output_scale
