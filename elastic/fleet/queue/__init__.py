"""The queue of a fleet: who gets slots first, and which job gives them back for another one. Pure.

    order.py      the order in which jobs get slots: quotas of owners, priorities, age
    victims.py    which jobs are made smaller, and which are preempted, so that another one can begin
    scheduler.py  which job gets which slots, and what the other jobs wait for

Nothing is kept from one decision to the next: the documents of the jobs say everything, so another leader goes on with
a preemption that is half done.
"""
