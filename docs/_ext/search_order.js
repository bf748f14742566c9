// Search results: pages for users come before those about the code and before the changelog.
// `score` is called for each result; the other numbers are Sphinx's own.
const LAST = /^(decisions\/|architecture|walks|developing|contributing|changelog)/;
var Scorer = {
  score: ([page, , , , score]) => (LAST.test(page) ? score - 1000 : score),
  objNameMatch: 11,
  objPartialMatch: 6,
  objPrio: { 0: 15, 1: 5, 2: -5 },
  objPrioDefault: 0,
  title: 15,
  partialTitle: 7,
  term: 5,
  partialTerm: 2,
};
