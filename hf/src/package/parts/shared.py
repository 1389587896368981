class Shared(nn.Module):
    """A network that every token uses, as well as those that are chosen."""

    def __init__(self, c, h):
        super().__init__()
        self.activation, size = c["activation"], c["shared"] * c["intermediate"]
        self.gate = Matrix(size, h) if c["gated"] else None
        self.up, self.down = Matrix(size, h), Matrix(h, size)

    def forward(self, x):
        gate = None if self.gate is None else F.linear(x, self.gate.weight)
        return F.linear(activate(self.activation, gate, F.linear(x, self.up.weight)), self.down.weight)
