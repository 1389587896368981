"""`python -m dreamc.mlflow RUN`: follows a run's metrics with the mlflow package installed here."""

from __future__ import annotations

from .follow import arguments, follow, tracker


def main() -> None:
    """Follows one run until it ends."""
    given = arguments("mlflow")
    mlflow = tracker("mlflow")
    mlflow.set_experiment(given.project)
    with mlflow.start_run(run_name=given.run.name):
        mlflow.log_artifact(str(given.run / "spec.yaml"))
        follow(given.run, given.once, lambda figures, step: mlflow.log_metrics(figures, step=step))


if __name__ == "__main__":
    main()
