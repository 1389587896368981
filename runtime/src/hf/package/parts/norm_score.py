class NormScore(nn.Module):
    """A number of each token: `scale · ‖x‖ + offset`."""

    def __init__(self):
        super().__init__()
        self.scale, self.offset = Matrix(1), Matrix(1)

    def forward(self, x):
        return self.scale.weight.float() * x.float().norm(dim=-1) + self.offset.weight.float()
