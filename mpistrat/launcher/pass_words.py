"""Between a launcher and a program whose words the launcher would take for its own: `pass_words.py =WORD =WORD …`.

Run by its path, with the standard library only. The program, whose words are those behind the "=", takes this process's place.
"""

from __future__ import annotations

import os
import sys

if __name__ == "__main__":
    words = [word[1:] for word in sys.argv[1:]]
    os.execvp(words[0], words)
