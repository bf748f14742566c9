"""Between a launcher and a program whose words the launcher would take for its own: `pass_words.py WORDS`, as JSON.

Run by its path, with the standard library only. The program takes this process's place.
"""

from __future__ import annotations

import json
import os
import sys

if __name__ == "__main__":
    words = json.loads(sys.argv[1])
    os.execvp(words[0], words)
