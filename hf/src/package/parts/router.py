class Router(nn.Module):
    """Chooses experts for every token: the numbers of the `active` best, and a gate for each."""

    def __init__(self, hidden, experts, r):
        super().__init__()
        self.r = r
        if r["query"]:  #? lowrank&linear
            self.query = Matrix(r["query"], hidden)  #? lowrank&linear
            self.keys = Matrix(experts, r["query"])  #? lowrank&linear
            self.q_norm, self.k_norm = Norm(r["query"]), Norm(r["query"])  #? lowrank&linear
        else:  #? lowrank&linear
            self.weight = nn.Parameter(torch.zeros(experts, hidden))  #? lowrank&linear
        self.query = Matrix(r["query"], hidden)  #? lowrank&!linear
        self.keys = Matrix(experts, r["query"])  #? lowrank&!linear
        self.q_norm, self.k_norm = Norm(r["query"]), Norm(r["query"])  #? lowrank&!linear
        self.weight = nn.Parameter(torch.zeros(experts, hidden))  #? linear&!lowrank
        if r["balanced"]:  #? balanced
            self.bias = nn.Parameter(torch.zeros(experts), requires_grad=False)  #? balanced

    def logits(self, x, at):
        """Of every expert, from the norm of the stream."""
        if not self.r["query"]:  #? lowrank&linear
            return F.linear(x, self.weight)  #? lowrank&linear
        return F.linear(x, self.weight)  #? linear&!lowrank
        size = self.r["query"]  #? lowrank
        q = self.q_norm(F.linear(x, self.query.weight))  #? lowrank
        if self.r["rope"]:  #? lowrank&depth_rope
            q = rotate(q, depth_angles(size, self.r["rope"], at, x.device), self.r["rope"])  #? lowrank&depth_rope
        return F.linear(q, self.k_norm(self.keys.weight)) / math.sqrt(size)  #? lowrank

    def forward(self, x, active, at):
        logits = self.logits(x, at).float()
        if hasattr(self, "logit_bias"):  #? biased
            logits = logits + self.logit_bias.float()  #? biased
        scores = logits.sigmoid() if self.r["score"] == "sigmoid" else logits.softmax(-1)
        if self.r["score"] == "sqrtsoftplus":  #? sqrtsoftplus
            scores = F.softplus(logits).sqrt()  #? sqrtsoftplus
        best = logits if self.r["select"] == "logit" else scores
        if self.r["balanced"]:  #? balanced
            best = best + self.bias.float()  #? balanced
        if self.r["topk_groups"] < self.r["groups"]:  #? grouped
            # A group is as good as its two best; experts of the others are out of the question.  #? grouped
            groups = best.unflatten(-1, (self.r["groups"], -1))  #? grouped
            two = groups.topk(min(2, groups.shape[-1]), -1).values.sum(-1)  #? grouped
            worst = two.topk(self.r["topk_groups"], -1).values[..., -1:]  #? grouped
            best = (groups - 1e30 * (two < worst)[..., None]).flatten(-2)  #? grouped
        # Of equal ones the first.
        chosen = best.sort(dim=-1, descending=True, stable=True).indices[..., :active]
        gates = scores.gather(-1, chosen)
        if self.r["normalise"]:  #? normalise
            gates = gates / gates.sum(-1, keepdim=True)  #? normalise
        return chosen, (gates * self.r["scale"]).to(x.dtype)  #? router_scale
        return chosen, gates.to(x.dtype)  #? !router_scale
