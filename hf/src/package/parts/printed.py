class DreamcForCausalLM(PreTrainedModel, GenerationMixin):
    """The model above as transformers has models. It has no cache: every step reads the whole text again."""

    config_class = DreamcConfig
    base_model_prefix = ""
    main_input_name = "input_ids"

    def __init__(self, config):
        super().__init__(config)
        # Its tensors are those of the model, under the names that they have in checkpoints.
        whole = Model()
        for held in ("_modules", "_parameters", "_buffers"):
            getattr(self, held).update(getattr(whole, held))
            whole.__dict__[held] = getattr(self, held)
        self.__dict__["whole"] = whole
        self.config.use_cache = False
        self.post_init()

    def _init_weights(self, module):
        """Weights come from the file; what is made without one begins as small numbers, and gains as they are."""
        for weight in module.parameters(recurse=False):
            if weight.dim() > 1 and not getattr(weight, "_is_hf_initialized", False):
                weight.data.normal_(0.0, 0.02)

    def get_input_embeddings(self):
        return self.embed

    @classmethod
    def _supports_default_dynamic_cache(cls):
        return False

    def prepare_inputs_for_generation(self, input_ids, attention_mask=None, **kwargs):
        return {"input_ids": input_ids, "attention_mask": attention_mask}

    def forward(self, input_ids, attention_mask=None, labels=None, logits_to_keep=0, **kwargs):
        """Logits of every token, or of the last `logits_to_keep`; `attention_mask` is 0 for padding on the left."""
        b, t = input_ids.shape
        begins = [0] * b if attention_mask is None else attention_mask[:, :t].long().argmax(-1).tolist()
        self.whole.training = self.training
        logits = None
        # Rows whose texts begin at the same place go together.
        for begin in sorted(set(begins)):
            rows = torch.tensor([i for i, at in enumerate(begins) if at == begin], device=input_ids.device)
            ids = input_ids[rows, begin:]
            places = torch.arange(t - begin, device=ids.device).expand(ids.shape)  #? noise
            found = self.whole(ids, noise=noise(places, self.config.hidden_size))  #? noise
            found = self.whole(ids)  #? !noise
            if logits is None:
                logits = found.new_zeros((b, t, found.shape[-1]))
            logits = logits.index_put((rows[:, None], torch.arange(begin, t, device=rows.device)[None]), found)
        loss = None
        if labels is not None:
            loss = F.cross_entropy(logits[:, :-1].flatten(0, 1).float(), labels[:, 1:].flatten(), ignore_index=-100)
        if logits_to_keep:
            logits = logits[:, -logits_to_keep:]
        return CausalLMOutputWithPast(loss=loss, logits=logits)
