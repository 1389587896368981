"""lm-evaluation-harness against `dreamc serve`: `lm_eval_client.py URL MODEL ROWS`; with the URL `package`, against the package
`dreamc` that is installed here, and MODEL is the folder of a run.

Three tasks over the local rows: choices ranked by log-likelihood, the rolling log-likelihood of the prompts, and answers
that are generated until a space. The last line is a JSON object of what was found.
"""

import json
import os
import pathlib
import sys

os.environ.update(HF_DATASETS_OFFLINE="1", HF_HUB_OFFLINE="1", TOKENIZERS_PARALLELISM="false", OPENAI_API_KEY="none")

import lm_eval
from lm_eval.tasks import TaskManager

url, model, rows = sys.argv[1:]
if url == "package":
    # Importing it registers its models.
    import dreamc.lm_eval
tasks = pathlib.Path("tasks")
tasks.mkdir(exist_ok=True)
head = f"dataset_path: json\ndataset_kwargs: {{data_files: {{test: {pathlib.Path(rows).resolve()}}}}}\ntest_split: test\n"
(tasks / "ranked.yaml").write_text(
    f"task: ranked\n{head}output_type: multiple_choice\ndoc_to_text: '{{{{prompt}}}}'\ndoc_to_choice: '{{{{choices}}}}'\n"
    "doc_to_target: '{{answer}}'\ntarget_delimiter: ''\nmetric_list: [{metric: acc}]\n"
)
(tasks / "rolled.yaml").write_text(
    f"task: rolled\n{head}output_type: loglikelihood_rolling\ndoc_to_text: ''\ndoc_to_target: '{{{{prompt}}}}'\n"
    "metric_list: [{metric: word_perplexity}]\n"
)
(tasks / "written.yaml").write_text(
    f"task: written\n{head}output_type: generate_until\ndoc_to_text: '{{{{prompt}}}}'\ndoc_to_target: '{{{{choices[answer]}}}}'\n"
    "generation_kwargs: {until: [' ', '.'], max_gen_toks: 12, do_sample: false}\nmetric_list: [{metric: exact_match}]\n"
)
served = f"model={model},base_url={url},tokenizer_backend=remote,tokenized_requests=True,max_length=512,num_concurrent=8"
found = lm_eval.simple_evaluate(
    model="dreamc" if url == "package" else "local-completions",
    model_args=f"path={model}" if url == "package" else served,
    tasks=["ranked", "rolled", "written"],
    task_manager=TaskManager(include_path=str(tasks), include_defaults=False),
    bootstrap_iters=0,
)["results"]
print(
    json.dumps(
        {
            "accuracy": found["ranked"]["acc,none"],
            "word_perplexity": found["rolled"]["word_perplexity,none"],
            "exact": found["written"]["exact_match,none"],
        }
    )
)
