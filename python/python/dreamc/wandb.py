"""`python -m dreamc.wandb RUN`: follows a run's metrics with the wandb package installed here."""

from __future__ import annotations

from .follow import arguments, follow, tracker


def main() -> None:
    """Follows one run until it ends."""
    given = arguments("wandb")
    wandb = tracker("wandb")
    spec = (given.run / "spec.yaml").read_text(encoding="utf-8")
    session = wandb.init(project=given.project, name=given.run.name, config={"spec": spec})
    follow(given.run, given.once, lambda figures, step: session.log(figures, step=step))
    session.finish()


if __name__ == "__main__":
    main()
