"""Data of lmms-eval's tasks for the tests, one folder per task with the columns of the hub."""

from pathlib import Path

from datasets import Dataset, Features, Image, Sequence, Value
from PIL import Image as Pictures

COLORS = {"red": (200, 30, 30), "blue": (30, 40, 200), "green": (20, 160, 40), "gray": (90, 90, 90)}
TEXT = Value("string")
TASKS = {"mmstar": "val", "ai2d": "test", "ocrbench": "test", "pope": "test"}  # split with the questions, by task


def draw_picture(number: int) -> Pictures.Image:
    """Return a different image for each number, with the color of `color`."""
    image = Pictures.new("RGB", (40, 30), COLORS[color(number)])
    image.putpixel((number % 40, number // 40), (255, 255, 255))
    return image


def color(number: int) -> str:
    return list(COLORS)[number % len(COLORS)]


def write_evaluations(root: Path, images: int = 4) -> Path:
    """Write each task's data and return their folder."""
    for task, split in TASKS.items():
        rows, features = globals()[f"_{task}"](images)
        write_task(root / task, split, rows, features)
    return root


def write_task(folder: Path, split: str, rows: list[dict], features: dict) -> None:
    """Write a task's data; `features` has the types of all columns except `image`."""
    (folder / "data").mkdir(parents=True)
    table = Dataset.from_list(rows, Features(features | {"image": Image()}))
    table.to_parquet(folder / "data" / f"{split}-00000-of-00001.parquet")


def _pope(images: int) -> tuple[list[dict], dict]:
    """Return two questions per image: about an object on the image, and about an object that is not on it."""
    questions = [
        (number, object_color) for number in range(images) for object_color in (color(number), color(number + 1))
    ]
    rows = [
        {
            "id": str(index),
            "question_id": str(index),
            "question": f"Is there a {object_color} surface in the image?",
            "answer": "yes" if object_color == color(number) else "no",
            "image_source": f"image_{number}",
            "image": draw_picture(number),
            "category": "adversarial",
        }
        for index, (number, object_color) in enumerate(questions)
    ]
    return rows, dict.fromkeys(("id", "question_id", "question", "answer", "image_source", "category"), TEXT)


def _mmstar(images: int) -> tuple[list[dict], dict]:
    categories = [("coarse perception", "image emotion"), ("math", "geometry"), ("math", "statistical reasoning")]
    rows = [
        {
            "index": number,
            "question": "What color is it?\nOptions: A: red, B: blue, C: green, D: gray",
            "image": draw_picture(number),
            "answer": "ABCD"[number % 4],
            "category": categories[number % 3][0],
            "l2_category": categories[number % 3][1],
        }
        for number in range(images)
    ]
    return rows, dict.fromkeys(("question", "answer", "category", "l2_category"), TEXT) | {"index": Value("int64")}


def _ai2d(images: int) -> tuple[list[dict], dict]:
    rows = [
        {"question": "What color?", "options": list(COLORS), "answer": str(number % 4), "image": draw_picture(number)}
        for number in range(images)
    ]
    return rows, {"question": TEXT, "answer": TEXT, "options": Sequence(TEXT)}


def _ocrbench(images: int) -> tuple[list[dict], dict]:
    rows = [
        {
            "dataset": "IIIT5K",
            "question": "what is written in the image?",
            "question_type": "Regular Text Recognition",
            "answer": [color(number)],
            "image": draw_picture(number),
        }
        for number in range(images)
    ]
    return rows, {"dataset": TEXT, "question": TEXT, "question_type": TEXT, "answer": Sequence(TEXT)}
