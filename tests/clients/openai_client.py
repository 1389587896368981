"""OpenAI's own client against `dreamc serve`: `openai_client.py BASE KEY`."""

import asyncio
import sys

import openai

base, key = sys.argv[1:]
client = openai.OpenAI(base_url=base, api_key=key, max_retries=0)
model = client.models.list().data[0].id
assert client.models.retrieve(model).id == model

whole = client.completions.create(model=model, prompt="The quick", max_tokens=40, temperature=0, logprobs=2)
choice = whole.choices[0]
assert len(choice.text) > 10 and choice.finish_reason in ("length", "stop"), whole
assert whole.usage.completion_tokens == len(choice.logprobs.tokens) == len(choice.logprobs.token_logprobs)
assert all(score == max(top.values()) for score, top in zip(choice.logprobs.token_logprobs, choice.logprobs.top_logprobs))

pieces = client.completions.create(model=model, prompt="The quick", max_tokens=40, temperature=0, stream=True)
assert "".join(piece.choices[0].text for piece in pieces) == choice.text

several = client.completions.create(model=model, prompt=["The", "quick"], n=3, seed=1, max_tokens=8, extra_body={"top_k": 5})
assert [c.index for c in several.choices] == list(range(6))
assert several.choices[0].text == client.completions.create(model=model, prompt="The", seed=1, max_tokens=8, extra_body={"top_k": 5}).choices[0].text

for wrong, error in [
    ({"model": "other"}, openai.NotFoundError),
    ({"max_tokens": 10**6}, openai.BadRequestError),
    ({"extra_body": {"nonsense": 1}}, openai.BadRequestError),
]:
    try:
        client.completions.create(**{"model": model, "prompt": "a", **wrong})
        raise SystemExit(f"{wrong} was answered")
    except error as found:
        assert found.body["message"], found
try:
    openai.OpenAI(base_url=base, api_key="other", max_retries=0).models.list()
    raise SystemExit("any key was good")
except openai.AuthenticationError:
    pass


async def many():
    client = openai.AsyncOpenAI(base_url=base, api_key=key, max_retries=0)
    texts = [client.completions.create(model=model, prompt="The quick", max_tokens=40, temperature=0) for _ in range(32)]
    return {answer.choices[0].text for answer in await asyncio.gather(*texts)}


assert asyncio.run(many()) == {choice.text}
print("all well")
