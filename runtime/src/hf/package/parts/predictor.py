class Predictor(nn.Module):
    """A small network that says which tokens a router would choose."""

    def __init__(self, size, hidden):
        super().__init__()
        self.up, self.down = Matrix(size, hidden), Matrix(size)

    def forward(self, x):
        return (F.silu(F.linear(x, self.up.weight)) * self.down.weight).sum(-1)
