class Choice(nn.Module):  #? depth_choice
    """How many passes of a loop a token makes."""  #? depth_choice
#? depth_choice
    def __init__(self, passes, hidden):  #? depth_choice
        super().__init__()  #? depth_choice
        self.weight, self.bias = nn.Parameter(torch.zeros(passes, hidden)), nn.Parameter(torch.zeros(passes))  #? depth_choice
#? depth_choice
    def forward(self, x):  #? depth_choice
        """Each token's last pass, and the share of that choice."""  #? depth_choice
        share = (x @ self.weight.T).softmax(-1)  #? depth_choice
        last = (share + self.bias).argmax(-1)  #? depth_choice
        return last, share.gather(-1, last[..., None])  #? depth_choice
#? depth_choice
#? depth_choice
class Gate(nn.Module):  #? exit_gate
    """A direction of the stream and an offset, which say how much of a token leaves a loop after a pass."""  #? exit_gate
#? exit_gate
    def __init__(self, hidden):  #? exit_gate
        super().__init__()  #? exit_gate
        self.weight, self.bias = nn.Parameter(torch.zeros(hidden)), nn.Parameter(torch.zeros(1))  #? exit_gate
#? leaving
    def forward(self, x, at, share):  #? leaving
        """Lets tokens leave of which more than a share has."""  #? leaving
        if at.turn == 0:  #? leaving
            at.rest, at.this_pass = x.new_ones(x.shape[:2]), []  #? leaving
        else:  #? leaving
            at.rest = at.rest * (1.0 - (x @ self.weight + self.bias).sigmoid())  #? leaving
        at.gone = 1.0 - at.rest > share  #? leaving
        at.last_pass, at.this_pass = at.this_pass, []  #? leaving
#? exit_gate
#? exit_gate
class Loop(nn.Module):
    """Weights of a loop that are no layer's."""

    def __init__(
        self, config, passes, embed=False, exit=False,
        kv_first=False,  #? kv_first
        choice=False,  #? depth_choice
    ):
        super().__init__()
        self.passes = passes  #? passes
        self.kv_first = kv_first  # passes use the keys and values of the first  #? kv_first
        self.choice = Choice(passes, config.hidden_size) if choice else None  #? depth_choice
        self.embed = Matrix(passes, config.hidden_size) if embed else None  #? pass_embed
        self.exit, self.share = Gate(config.hidden_size) if exit else None, config.exit  #? leaving
        # The share of a token's loss that each pass has in training; nothing else reads it.  #? exit_gate&!leaving
        self.exit = Gate(config.hidden_size) if exit else None  #? exit_gate&!leaving
#? turns
    def forward(self, x, at):  #? turns
        """Begins a pass."""  #? turns
        at.loop, at.turn = self, at.turn + 1 if at.loop is self else 0  #? turns
        at.shares, at.place = self.kv_first, 0  #? kv_first
        if at.turn == 0:  #? kv_first
            at.first_pass = []  #? kv_first
        if at.turn >= self.passes:  #? passes
            raise ValueError(f"this loop has weights for {self.passes} passes")  #? passes
        if self.choice is not None and at.turn == 0:  #? depth_choice
            at.start, (at.last_turn, at.gate) = x, self.choice(x)  #? depth_choice
        if self.exit is not None and self.share is not None:  #? leaving
            self.exit(x, at, self.share)  #? leaving
        if self.embed is not None:  #? pass_embed
            x = x + self.embed.weight[at.turn]  #? pass_embed
        return x  #? turns
