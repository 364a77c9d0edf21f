"""For every ready-made recipe one record in its published columns, and what must become of it."""

import base64
import io
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from PIL import Image


def png(color: str = "white", *, size: tuple[int, int] = (20, 10)) -> bytes:
    """A small image as a file's bytes."""
    data = io.BytesIO()
    Image.new("RGB", size, color).save(data, format="PNG")
    return data.getvalue()


def feature(color: str = "white") -> dict[str, object]:
    """Hugging Face's image feature as Parquet files hold it."""
    return {"bytes": png(color), "path": None}


@dataclass(frozen=True, kw_only=True)
class RecipeSample:
    record: Mapping[str, Any]
    answer: str
    says: str
    """Stands in the prompt."""
    images: int = 1
    files: tuple[str, ...] = ()
    """Images that lie beside the row file."""
    filtered: Mapping[str, Any] = field(default_factory=dict)
    """With these columns the record is taken away by a condition; empty where the recipe has none."""
    group: str = ""


THINK = "First output the thinking process in <think> </think>"
R1V = "Output the thinking process in <think> </think> and final answer (number)"
CHOICES = {"A": "red", "B": "blue", "C": "green", "D": "grey"}
MESSAGE = json.dumps(
    [
        {"role": "system", "content": "Think first."},
        {"role": "user", "content": [{"type": "image", "image": "img/1.png"}, {"type": "text", "text": "Find x."}]},
    ]
)
TEXT_MESSAGE = json.dumps([{"role": "system", "content": "Think first."}, {"role": "user", "content": "1 + 1?"}])
MESSAGE_ROW = RecipeSample(
    record={"message": MESSAGE, "answer": "$4$", "question": "Find x."},
    answer="$4$",
    says="Find x.",
    files=("img/1.png",),
)


def _r1v(problem: str, solution: str, answer: str, **columns: Any) -> RecipeSample:
    record = {"image": feature(), "problem": problem, "solution": solution} | columns
    return RecipeSample(record=record, answer=answer, says=f"{problem}  {R1V}")


def _mini_o3(name: str) -> RecipeSample:
    record = {
        "images": [f"{name}/data/1.png"],
        "problem": "<image>\nWhat does it say?",
        "solution": "STOP",
        "doc_id": 1,
    }
    return RecipeSample(record=record, answer="STOP", says=f"What does it say? {THINK}", files=("data/1.png",))


def _conversation(image: str, reply: str, answer: str, **more: Any) -> RecipeSample:
    human = {"from": "human", "value": "<image>\nHint: give the letter.\nQuestion: Is AB = CD?"}
    record = {"id": "1", "image": image, "conversations": [human, {"from": "gpt", "value": reply}]}
    return RecipeSample(record=record, answer=answer, says="Question: Is AB = CD? First", files=(image,), **more)


def _mmmu(choices: list[str], **columns: Any) -> dict[str, Any]:
    images = {f"image_{number}": feature() if number < 3 else None for number in range(1, 8)}
    record = {"id": "1", "question": "Which of <image 1> and <image 2>?", "options": str(choices), "answer": "B"}
    return record | images | columns


DIGITS = {"image": feature(), "label": [3, 1, 2], "total": 6, "messages": []}
SAMPLES: dict[str, RecipeSample] = {
    "deepscaler_40k": RecipeSample(
        record={"message": TEXT_MESSAGE, "answer": "$2$"}, answer="$2$", says="1 + 1?", images=0
    ),
    "vermulti": MESSAGE_ROW,
    "mathv60k": MESSAGE_ROW,
    "vermulti_geo": MESSAGE_ROW,
    "mathv360k": _conversation("FigureQA/1.png", "The answer needs care: AB = 3 = CD. The answer is yes.", "yes"),
    "mathv360k_geo": _conversation(
        "Geometry3K/train/1.png", "Solution: 3 + 4\nAnswer: B", "B", filtered={"image": "FigureQA/1.png"}
    ),
    "geometry3k_train": RecipeSample(
        record={"images": [feature()], "problem": "<image>Find x.", "answer": r"2\sqrt{2}", "id": 1},
        answer=r"2\sqrt{2}",
        says="Find x. First",
    ),
    "math12k": RecipeSample(record={"problem": "2 + 2?", "answer": "4"}, answer="4", says="2 + 2? First", images=0),
    "clevr_70k_counting": _r1v("How many items?", "<answer> 3 </answer>", "3"),
    "clevr_70k_complex": _r1v("How many cubes?", "<answer> 0 </answer>", "0"),
    "geoqa_8k": _r1v("∠1 = ()", "<answer> 40° </answer>", "40°"),
    "clevr_r1_traces": _r1v("How many cubes?", "<answer> 2 </answer>", "2", thinking="<think>One, two.</think>"),
    "journeybench_multi_image": RecipeSample(
        record={
            "images": [feature(), feature("red")],
            "problem": "<image> and <image>: how many cats?",
            "answer": "5",
        },
        answer="5",
        says="how many cats? First",
        images=2,
    ),
    "digit_recognition": RecipeSample(
        record=DIGITS | {"task": "recognition"},
        answer="1, 2, 3",
        says="sorted from lowest to highest. First",
        filtered={"task": "addition"},
    ),
    "digit_addition": RecipeSample(
        record=DIGITS | {"task": "addition"},
        answer="6",
        says="sum of the digits in this image? First",
        filtered={"task": "recognition"},
    ),
    "message_decoding": RecipeSample(
        record={"image": feature(), "coded_message": "k x i _ q", "decoded_message": "cat a", "task": "word_2"},
        answer="cat a",
        says="words: k x i _ q. An underscore (_) in it stands for a space. First",
    ),
    "message_decoding_words": RecipeSample(
        record={"image": feature(), "coded_message": "K X I", "decoded_message": "CAT", "mapping": "{}"},
        answer="CAT",
        says="K X I. The decoded message should be an English word. First",
    ),
    "visual_probe_train": _mini_o3("VisualProbe_train"),
    "deepeyes_4k": _mini_o3("DeepEyes_train_4K"),
    "virl39k": RecipeSample(
        record={
            "qid": "q",
            "question": "<image>\nHow many?",
            "answer": r"\boxed{\frac{1}{2}}",
            "image": ["images/1.png", "images/2.png"],
            "category": "Charts",
            "source": "s",
        },
        answer=r"\frac{1}{2}",
        says="How many? First",
        images=2,
        files=("images/1.png", "images/2.png"),
        group="Charts",
    ),
    "mmk12": RecipeSample(
        record={"id": "1", "question": "<image>How far?", "answer": "3 m", "subject": "physics", "image": feature()},
        answer="3 m",
        says="How far? First",
    ),
    "math500": RecipeSample(
        record={
            "problem": "3 + 3?",
            "solution": "s",
            "answer": "6",
            "subject": "Algebra",
            "level": 1,
            "unique_id": "u",
        },
        answer="6",
        says="3 + 3? First",
        images=0,
    ),
    "gpqa_diamond": RecipeSample(
        record={"Question": "Which?", "Correct Answer": "a"} | {f"Incorrect Answer {n}": f"w{n}" for n in (1, 2, 3)},
        # By the hash of the four texts the order is fixed.
        answer="?",
        says="Which?\n(A) ",
        images=0,
    ),
    "olympiadbench": RecipeSample(
        record={
            "question": "Find all x.",
            "images": [feature(), feature()],
            "final_answer": ["1", "2"],
            "answer_type": "Numerical",
            "subfield": "Algebra",
        },
        answer="1, 2",
        says="Find all x. First",
        images=2,
        filtered={"answer_type": "Need_human_evaluate"},
    ),
    "mathvista": RecipeSample(
        record={"pid": "1", "question": "How far?", "decoded_image": feature(), "choices": None, "answer": "1.2"},
        answer="1.2",
        says="How far?",
    ),
    "mathvista_mc": RecipeSample(
        record={
            "pid": "1",
            "question": "Is it red?",
            "decoded_image": feature(),
            "choices": ["Yes", "No"],
            "answer": "No",
            "question_type": "multi_choice",
        },
        answer="B",
        says="Is it red?\n(A) Yes\n(B) No\nFirst",
        filtered={"question_type": "free_form"},
    ),
    "mathvision": RecipeSample(
        record={
            "id": "1",
            "question": "Which?\n<image1>",
            "options": ["1", "2", "3"],
            "decoded_image": feature(),
            "answer": "C",
            "level": 2,
        },
        answer="C",
        says="<image1>\n(A) 1\n(B) 2\n(C) 3\nFirst",
        group="2",
    ),
    "mathverse": RecipeSample(
        record={
            "question": "Find x.\nChoices:\nA:1\nB:2",
            "image": feature(),
            "answer": "B",
            "problem_version": "Vision Only",
        },
        answer="B",
        says="A:1\nB:2 First",
        group="Vision Only",
    ),
    "mmstar": RecipeSample(
        record={
            "index": 1,
            "question": "Which?\nOptions: A: a, B: b",
            "image": png(),
            "answer": "A",
            "category": "math",
        },
        answer="A",
        says="Options: A: a, B: b\nFirst",
        group="math",
    ),
    "mmmu": RecipeSample(
        record=_mmmu(["one", "it's two"], question_type="multiple-choice"),
        answer="B",
        says="<image 2>?\n(A) one\n(B) it's two\nFirst",
        images=2,
        filtered={"question_type": "open"},
    ),
    "mmmu_pro": RecipeSample(
        record=_mmmu([str(number) for number in range(10)], subject="Art"),
        answer="B",
        says="(J) 9\nFirst",
        images=2,
        group="Art",
    ),
    "logicvista": RecipeSample(
        record={"imagename": "0.png", "question": "Which follows? A, B or C", "answer": "C", "skill": ["inductive"]},
        answer="C",
        says="A, B or C\nFirst",
        files=("0.png",),
    ),
    "wemath": RecipeSample(
        record={
            "ID": "1",
            "question": "Area?",
            "option": "A. 1; B. 2",
            "answer": "B",
            "image_path": "1/a.png",
            "key": "2steps_1",
        },
        answer="B",
        says="Area?\nA. 1; B. 2\nFirst",
        files=("1/a.png",),
        group="2steps_1",
    ),
    "dynamath": RecipeSample(
        record={
            "id": "1",
            "question": "Period?",
            "image": "images/1.png",
            "decoded_image": feature(),
            "ground_truth": "3.14",
            "answer_type": "float",
        },
        answer="3.14",
        says="Period? First",
        group="float",
    ),
    "superclevr_200": RecipeSample(
        record={"image": feature(), "question": "How many different items?", "ground_truth": 10},
        answer="10",
        says="How many different items? First",
    ),
    "geoqa_test": RecipeSample(
        record={"image_path": "./Geo170K/images/test/0.png", "question": "∠1 = ()", "ground_truth": "40°"},
        answer="40°",
        says=f"∠1 = ()  {R1V}",
        files=("Geo170K/images/test/0.png",),
    ),
    "vstar": RecipeSample(
        record={
            "image": "direct_attributes/sa_1.jpg",
            "text": "Colour?\n(A) red\n(B) blue\nAnswer with the option's letter from the given choices directly.",
            "label": "B",
            "category": "direct_attributes",
            "question_id": 0,
        },
        answer="B",
        says="(B) blue\nFirst",
        files=("direct_attributes/sa_1.jpg",),
        group="direct_attributes",
    ),
    "textvqa": RecipeSample(
        record={"image": feature(), "question": "What brand?", "answers": ["dakota"] * 6 + ["Dakota digital"] * 4},
        answer="dakota",
        says="What brand? First",
    ),
    "aokvqa": RecipeSample(
        record={
            "image": feature(),
            "question": "Where?",
            "choices": ["sea", "zoo", "bus", "bed"],
            "correct_choice_idx": 2,
        },
        answer="C",
        says="Where?\n(A) sea\n(B) zoo\n(C) bus\n(D) bed\nFirst",
    ),
    "mme_realworld": RecipeSample(
        record={
            "bytes": base64.b64encode(png(size=(64, 64))).decode(),
            "question": "Which car?",
            "multi-choice options": ["(A) red", "(B) blue", "(C) none", "(D) two", "(E) not in the image"],
            "answer": "E",
            "category": "Perception/OCR",
        },
        answer="E",
        says="(D) two\n(E) not in the image\nFirst",
        group="Perception/OCR",
    ),
}
for _k in ("4", "8"):
    SAMPLES[f"hr_bench_{_k}k"] = RecipeSample(
        record=CHOICES
        | {"index": 1, "question": "Colour?", "answer": "D", "category": "single", "cycle_category": "0"}
        | {"image": base64.b64encode(png(size=(64, 64))).decode()},
        answer="D",
        says="(C) green\n(D) grey\nFirst",
        group="single",
    )
for _level in ("Easy", "Medium", "Hard"):
    SAMPLES[f"visual_probe_{_level.lower()}"] = _mini_o3(f"VisualProbe_{_level}")
SAMPLES["visual_probe"] = _mini_o3("VisualProbe_Hard")
SAMPLES["geometry3k"] = SAMPLES["geometry3k_train"]
