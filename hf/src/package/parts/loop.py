class Scores(nn.Module):  #? choice_network
    """A small network that scores how many passes of a loop a token makes."""  #? choice_network
#? choice_network
    def __init__(self, size, passes, hidden):  #? choice_network
        super().__init__()  #? choice_network
        self.up, self.down = Matrix(size, hidden), Matrix(passes, size)  #? choice_network
#? choice_network
    def forward(self, x):  #? choice_network
        return F.linear(F.gelu(F.linear(x, self.up.weight)), self.down.weight)  #? choice_network
#? choice_network
#? choice_network
class Choice(nn.Module):  #? depth_choice
    """How many passes of a loop a token makes."""  #? depth_choice
#? depth_choice
    def __init__(self, passes, hidden, temperature=1.0, network=0):  #? depth_choice
        super().__init__()  #? depth_choice
        self.temperature = temperature  #? choice_temperature
        self.bias = nn.Parameter(torch.zeros(passes))  #? depth_choice
        if network:  #? choice_network
            self.network = Scores(network, passes, hidden)  #? choice_network
        else:  #? choice_network
            self.weight = nn.Parameter(torch.zeros(passes, hidden))  #? choice_network
        self.weight = nn.Parameter(torch.zeros(passes, hidden))  #? depth_choice&!choice_network
#? depth_choice
    def forward(self, x):  #? depth_choice
        """Each token's last pass, and the share of that choice."""  #? depth_choice
        x = x / self.temperature  #? choice_temperature
        z = self.network(x) if hasattr(self, "network") else x @ self.weight.T  #? choice_network
        z = x @ self.weight.T  #? depth_choice&!choice_network
        share = z.softmax(-1)  #? depth_choice
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
        kv_replaced=False,  #? kv_replaced
        choice=False,  #? depth_choice
        temperature=1.0,  #? choice_temperature
        network=0,  #? choice_network
    ):
        super().__init__()
        self.passes = passes  #? passes
        self.kv_first = kv_first  # passes use the keys and values of the first  #? kv_first
        self.kv_replaced = kv_replaced  # and their own where tokens take part  #? kv_replaced
        scores = {}  #? depth_choice
        scores["temperature"] = temperature  #? choice_temperature
        scores["network"] = network  #? choice_network
        self.choice = Choice(passes, config.hidden_size, **scores) if choice else None  #? depth_choice
        self.embed = Matrix(passes, config.hidden_size) if embed else None  #? pass_embed
        self.exit, self.share = Gate(config.hidden_size) if exit else None, config.exit  #? leaving
        # The share of a token's loss that each pass has in training; nothing else reads it.  #? exit_gate&!leaving
        self.exit = Gate(config.hidden_size) if exit else None  #? exit_gate&!leaving
#? turns
    def forward(self, x, at):  #? turns
        """Begins a pass."""  #? turns
        at.loop, at.turn = self, at.turn + 1 if at.loop is self else 0  #? turns
        at.shares, at.place = self.kv_first, 0  #? kv_first
        at.replaces = self.kv_replaced  #? kv_replaced
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
