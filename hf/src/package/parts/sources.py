class Sources:
    """What can be read instead of a stream: the embedding and the results since, sums of @BLOCK@ each."""  #? block
    """What can be read instead of a stream: the embedding and every result since."""  #? !block

    def __init__(self, x):
        self.all = [x]
        self.results = 0  #? block

    def add(self, y):
        if self.results % @BLOCK@:  #? block
            self.all[-1] = self.all[-1] + y  #? block
        else:  #? block
            self.all.append(y)  #? block
        self.results += 1  #? block
        self.all.append(y)  #? !block


class Read(nn.Module):
    """A mean of all sources, by a softmax over them."""

    def __init__(self, hidden):
        super().__init__()
        self.weight, self.norm = nn.Parameter(torch.zeros(hidden)), Norm(hidden)

    def forward(self, sources):
        v = torch.stack(sources.all, -2)
        p = (self.norm(v) @ self.weight).softmax(-1)
        return (p[..., None, :] @ v).squeeze(-2)
