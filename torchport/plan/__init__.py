"""What a job would take, known without its hardware: a program's memory, its time, and how they are known."""
