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
        self.post_norm = Norm(h) if c["post_norm"] else nn.Identity()  #? post_norm

    def forward(self, x, at):
        x = self.norm(x)
        gate = None if self.gate is None else linear(x, self.gate, at)  #? lora
        y = linear(activate(self.activation, gate, linear(x, self.up, at)), self.down, at)  #? lora
        gate = None if self.gate is None else F.linear(x, self.gate.weight)  #? !lora
        y = F.linear(activate(self.activation, gate, F.linear(x, self.up.weight)), self.down.weight)  #? !lora
        y = self.post_norm(y)  #? post_norm
        return @OUTPUT_SCALE@ * y  #? output_scale
        return y  #? !output_scale
