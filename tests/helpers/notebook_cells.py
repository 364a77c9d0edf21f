"""Run a notebook in a kernel of this interpreter, print what its code cells return, and fail as a cell does.

python notebook_cells.py NOTEBOOK FOLDER
"""

import sys

import nbformat
from nbclient import NotebookClient


def main(notebook: str, folder: str) -> None:
    read = nbformat.read(notebook, as_version=4)
    where = {"metadata": {"path": folder}}
    NotebookClient(read, timeout=600, kernel_name="python3", resources=where).execute()
    for cell in read.cells:
        for output in cell.get("outputs", ()):
            if output.output_type == "execute_result":
                sys.stdout.write(f"returned: {' '.join(output.data['text/plain'].split())}\n")
            elif output.output_type == "display_data":
                sys.stdout.write(f"shown: {output.data['text/plain'].strip()}\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
