class Score(nn.Module):
    """A number of each token, from the stream: its place along a direction."""

    def __init__(self, hidden):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(hidden))

    def forward(self, x):
        return (x.float() * self.weight.float()).sum(-1)
