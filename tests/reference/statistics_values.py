"""Prints the values that runtime/src/statistics/tests.rs compares with; needs scipy and scikit-learn."""
import numpy as np, scipy, sklearn
from scipy import stats
from sklearn.linear_model import LogisticRegression
print(scipy.__version__, sklearn.__version__)
a=[62.1,58.4,65.0,61.2,59.9]; b=[55.3,57.9,60.1,54.8,58.8]
r=stats.ttest_rel(a,b); print('paired',repr(r.statistic),repr(r.pvalue), r.df, r.confidence_interval(0.95))
d=np.array(a)-np.array(b); print('dz',repr(d.mean()/d.std(ddof=1)))
r=stats.ttest_rel(a[:3],b[:3]); print('paired3',repr(r.statistic),repr(r.pvalue), r.df, r.confidence_interval(0.95))
c=[2.31,2.28,2.40,2.35,2.29,2.33,2.30]; e=[2.45,2.39,2.52,2.41]
r=stats.ttest_ind(c,e,equal_var=False); print('welch',repr(r.statistic),repr(r.pvalue),repr(r.df),r.confidence_interval(0.95))
n,m=len(c),len(e); sp=np.sqrt(((n-1)*np.var(c,ddof=1)+(m-1)*np.var(e,ddof=1))/(n+m-2)); print('d',repr((np.mean(c)-np.mean(e))/sp))
x=[0.1,0.4,0.35,0.8,0.9,0.4,0.65,0.2]; y=[11.0,12.5,12.0,14.1,13.9,11.7,13.0,11.9]
print('pearson',stats.pearsonr(x,y)); r=stats.spearmanr(x,y);print('spearman',repr(r.statistic),repr(r.pvalue))
for k,N,p in [(7,20,.2),(0,12,.3),(512,1000,.5),(430,1000,.5),(13,13,.9),(60,400,.1),(25000,100000,.253)]:
    print('binom',k,N,p,repr(stats.binomtest(k,N,p).pvalue))
for t,df in [(0.5,1),(2,2),(4.303,2),(1.96,1000),(10,3),(25,7.5),(0.001,4)]:
    print('sf',t,df,repr(2*stats.t.sf(t,df)))
for p,df in [(.975,1),(.975,2),(.975,9.3),(.995,30),(.5,5)]:
    print('ppf',p,df,repr(stats.t.ppf(p,df)))
X=np.array([[((i*7+3)%11)/11-0.5,((i*5+1)%13)/13-0.5] for i in range(24)]); Y=np.array([(i*i+X[i][0]*8+i%3)%5>2 for i in range(24)])
print(X.tolist()); print(Y.tolist())
L=LogisticRegression(C=1.0,tol=1e-12,max_iter=100000,solver='newton-cholesky').fit(X,Y); print('logit',L.coef_,L.intercept_)
np.set_printoptions(precision=17); print(L.coef_,L.intercept_)
