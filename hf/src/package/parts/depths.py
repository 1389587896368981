class Left(nn.Module):
    """Keys before any norm and values that a component leaves in the depth stream: `[b, t, heads · size]` each."""

    def __init__(self, heads, size, hidden, biased):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(2 * heads * size, hidden))
        self.bias = nn.Parameter(torch.zeros(2 * heads * size)) if biased else None

    def forward(self, x):
        return F.linear(x, self.weight, self.bias).chunk(2, -1)
