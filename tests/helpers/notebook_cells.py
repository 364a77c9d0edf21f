"""Run a notebook in a kernel of this interpreter, print what its code cells return, and fail as a cell does.

python notebook_cells.py NOTEBOOK FOLDER [WRITTEN]

WRITTEN is the notebook with its outputs as text and PNG, without what was printed to stderr and without temporary files.
"""

import sys

import nbformat
from nbclient import NotebookClient

KEPT = ("text/plain", "image/png")


def main(notebook: str, folder: str, written: str | None = None) -> None:
    read = nbformat.read(notebook, as_version=4)
    where = {"metadata": {"path": folder}}
    metadata = dict(read.metadata)
    NotebookClient(read, timeout=600, kernel_name="python3", resources=where).execute()
    for cell in read.cells:
        for output in cell.get("outputs", ()):
            if output.output_type == "execute_result":
                sys.stdout.write(f"returned: {' '.join(output.data['text/plain'].split())}\n")
            elif output.output_type == "display_data":
                sys.stdout.write(f"shown: {output.data['text/plain'].strip()}\n")
    if written is not None:
        read.metadata = nbformat.from_dict(metadata)
        keep_outputs(read)
        nbformat.write(read, written)


def keep_outputs(read: nbformat.NotebookNode) -> None:
    """Remove from a notebook what differs from machine to machine and says nothing about its cells."""
    for cell in read.cells:
        cell.metadata.pop("execution", None)
        for output in cell.get("outputs", ()):
            if "data" in output:
                output.data = nbformat.from_dict({kind: output.data[kind] for kind in KEPT if kind in output.data})
        if cell.cell_type == "code":
            cell.outputs = [
                output
                for output in cell.outputs
                if output.output_type != "stream" or (output.name == "stdout" and not output.text.startswith("/"))
            ]


if __name__ == "__main__":
    main(*sys.argv[1:])
