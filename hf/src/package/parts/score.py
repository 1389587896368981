class Score(nn.Module):
    """A number of each token, from the stream: its place along a direction."""

    def __init__(self, hidden, passes=0):  #? pass_router
        super().__init__()  #? pass_router
        self.weight = nn.Parameter(torch.zeros(*[passes][: passes > 0], hidden))  #? pass_router
    def __init__(self, hidden):  #? !pass_router
        super().__init__()  #? !pass_router
        self.weight = nn.Parameter(torch.zeros(hidden))  #? !pass_router

    def forward(self, x, at):  #? pass_router
        weight = self.weight if self.weight.dim() == 1 else self.weight[at.turn]  #? pass_router
        return (x.float() * weight.float()).sum(-1)  #? pass_router
    def forward(self, x, at):  #? !pass_router
        return (x.float() * self.weight.float()).sum(-1)  #? !pass_router
